"""Launches of compiled kernels through the CUDA driver, with what can be prepared prepared."""

from __future__ import annotations

import ctypes
from typing import Any, final

from cuda.bindings import driver as cu
from kvarena.transfer._copy_kernel import Compiled
from kvarena.transfer.errors import EngineUnavailable

__all__ = ["Device", "Launcher", "check"]


def check(result: tuple[Any, ...], what: str) -> Any:
    """What a driver call returned beside its code; raises `RuntimeError` with the name of a failure."""
    code = result[0]
    if code != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what} failed with {code.name}")
    return result[1] if len(result) == 2 else result[1:] or None


@final
class Device:
    """A device's primary context, which PyTorch uses too, and one stream of our own in it.

    Raises
    ------
    EngineUnavailable
        There is no such device.
    """

    def __init__(self, index: int) -> None:
        try:
            check(cu.cuInit(0), "cuInit")
            self.number = check(cu.cuDeviceGet(index), "cuDeviceGet")
            self.context = check(cu.cuDevicePrimaryCtxRetain(self.number), "cuDevicePrimaryCtxRetain")
        except RuntimeError as error:
            raise EngineUnavailable("same-host", str(error)) from error
        self.context_address = int(self.context)
        self.capability = 10 * self._attribute("MAJOR") + self._attribute("MINOR")
        with self.current():
            flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            self.stream = check(cu.cuStreamCreate(flags), "cuStreamCreate")

    def current(self) -> _Current:
        """``with device.current()``: this thread has the device's context, and then again what it had."""
        return _Current(self)

    def close(self) -> None:
        """Let the stream and the context go."""
        with self.current():
            cu.cuStreamDestroy(self.stream)
        cu.cuDevicePrimaryCtxRelease(self.number)

    def _attribute(self, part: str) -> int:
        name = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}")
        return int(check(cu.cuDeviceGetAttribute(name, self.number), "cuDeviceGetAttribute"))


class _Current:
    """A thread that works on a device has its context already: then nothing is pushed."""

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> None:
        if int(cu.cuCtxGetCurrent()[1]) != self._device.context_address:
            check(cu.cuCtxPushCurrent(self._device.context), "cuCtxPushCurrent")
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            cu.cuCtxPopCurrent()


@final
class Launcher:
    """One loaded kernel whose parameters have 8 bytes each. The caller locks, and sets the context.

    Triton appends pointers of its own (scratch memory) to a kernel's parameters; how many depends on
    its version, so the driver is asked, and they are passed as null, which is right for kernels that
    want none.
    """

    def __init__(self, kernel: Compiled, arguments: int) -> None:
        self.kernel = kernel
        self.span_bytes = kernel.span_words * kernel.word_bytes
        self._module = check(cu.cuModuleLoadData(kernel.cubin), "cuModuleLoadData")
        self._function = check(
            cu.cuModuleGetFunction(self._module, kernel.name.encode()), "cuModuleGetFunction"
        )
        check(cu.cuFuncGetParamInfo(self._function, arguments - 1), "cuFuncGetParamInfo")
        count = arguments
        while cu.cuFuncGetParamInfo(self._function, count)[0] == cu.CUresult.CUDA_SUCCESS:
            count += 1
        self._values = (ctypes.c_uint64 * count)()
        pointers = [ctypes.addressof(self._values) + 8 * index for index in range(count)]
        self._pointers = (ctypes.c_void_p * count)(*pointers)
        self._params = ctypes.addressof(self._pointers)

    def launch(self, programs: int, stream: Any, *arguments: int) -> None:
        """Start `programs` blocks. Raises `RuntimeError`."""
        for index, value in enumerate(arguments):
            self._values[index] = value
        kernel = self.kernel
        (code,) = cu.cuLaunchKernel(
            self._function, programs, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream, self._params, 0
        )
        if code != cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuLaunchKernel of {programs} programs failed with {code.name}")

    def close(self) -> None:
        """Unload it."""
        cu.cuModuleUnload(self._module)
