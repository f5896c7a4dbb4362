"""The CUDA driver as copies use it: what can be prepared is, and the calls in between go through ctypes.

A call of `cuda.bindings` takes its arguments apart and makes objects of its answers; on the way of every
transfer that is several microseconds. Everything that is called once still goes through it.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, final

from cuda.bindings import driver as cu
from kvarena.transfer.errors import EngineUnavailable
from kvarena.transfer.same_host.copy.kernel import Compiled

__all__ = ["Device", "Launcher", "Stream", "check"]

_SUCCESS, _NOT_READY = 0, 600
# `CUstreamBatchMemOpParams` of cuda.h in words of 8 bytes: operation, address, value, flags, and what is
# not used here. Flags 0: a fence over the whole system goes before each store.
_STORE, _STORE_WORDS = 5, 6


def check(result: tuple[Any, ...], what: str) -> Any:
    """What a driver call returned beside its code; raises `RuntimeError` with the name of a failure."""
    code = result[0]
    if code != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what} failed with {code.name}")
    return result[1] if len(result) == 2 else result[1:] or None


def _failed(what: str, code: int) -> RuntimeError:
    try:
        name = cu.CUresult(code).name
    except ValueError:
        name = f"code {code}"
    return RuntimeError(f"{what} failed with {name}")


@final
class Device:
    """A device's primary context, which PyTorch uses too.

    Raises
    ------
    EngineUnavailable
        There is no such device, or no driver.
    """

    def __init__(self, index: int) -> None:
        try:
            check(cu.cuInit(0), "cuInit")
            self.number = check(cu.cuDeviceGet(index), "cuDeviceGet")
            self.context = check(cu.cuDevicePrimaryCtxRetain(self.number), "cuDevicePrimaryCtxRetain")
            self.calls = ctypes.CDLL("libcuda.so.1")
        except (RuntimeError, OSError) as error:
            raise EngineUnavailable("same-host", str(error)) from error
        self.context_address = int(self.context)
        self.capability = 10 * self._attribute("MAJOR") + self._attribute("MINOR")
        self.uuid = _uuid(self.number)
        self._seen = ctypes.c_void_p()
        self._seen_at = ctypes.byref(self._seen)
        # Too short to let go of the interpreter for.
        self._get_current = ctypes.PyDLL("libcuda.so.1").cuCtxGetCurrent

    def is_current(self) -> bool:
        """Whether this thread has the device's context. The caller locks."""
        self._get_current(self._seen_at)
        return self._seen.value == self.context_address

    def current(self) -> _Current:
        """``with device.current()``: this thread has the device's context, and then again what it had."""
        return _Current(self)

    def can_reach(self, uuid: str) -> bool | None:
        """Whether memory of that device can be mapped for this one; None: that one is not visible here."""
        if uuid == self.uuid:
            return True
        for index in range(check(cu.cuDeviceGetCount(), "cuDeviceGetCount")):
            other = check(cu.cuDeviceGet(index), "cuDeviceGet")
            if _uuid(other) == uuid:
                return bool(check(cu.cuDeviceCanAccessPeer(self.number, other), "cuDeviceCanAccessPeer"))
        return None

    def close(self) -> None:
        """Let the context go."""
        cu.cuDevicePrimaryCtxRelease(self.number)

    def _attribute(self, part: str) -> int:
        name = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}")
        return int(check(cu.cuDeviceGetAttribute(name, self.number), "cuDeviceGetAttribute"))


def _uuid(number: Any) -> str:
    return bytes(check(cu.cuDeviceGetUuid(number), "cuDeviceGetUuid").bytes).hex()


class _Current:
    __slots__ = ("_device",)

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        check(cu.cuCtxPushCurrent(self._device.context), "cuCtxPushCurrent")

    def __exit__(self, *_: object) -> None:
        cu.cuCtxPopCurrent()


@final
class Stream:
    """A stream of our own, and the calls on it. The caller locks, and sets the context."""

    def __init__(self, device: Device) -> None:
        calls = device.calls
        self._device = device
        self.handle = check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate")
        self.address = int(self.handle)
        self._event = check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
        self._pointer = ctypes.c_void_p(self.address)
        self._value, self._size = ctypes.c_uint64(), ctypes.c_size_t()
        self._target, self._source = ctypes.c_uint64(), ctypes.c_uint64()
        self._write, self._copy, self._query = (
            calls.cuStreamWriteValue64_v2,
            calls.cuMemcpyDtoDAsync_v2,
            calls.cuStreamQuery,
        )
        pair = (ctypes.c_uint64 * (2 * _STORE_WORDS))()
        self._pair = memoryview(pair).cast("B").cast("Q")
        self._pair[0] = self._pair[_STORE_WORDS] = _STORE
        self._both, self._pair_at = calls.cuStreamBatchMemOp_v2, ctypes.byref(pair)

    def write(self, address: int, value: int) -> None:
        """When all before is done and visible everywhere, store 8 bytes. Raises `RuntimeError`."""
        self._target.value, self._value.value = address, value
        # Flags 0: a fence over the whole system goes before the store.
        code = self._write(self._pointer, self._target, self._value, 0)
        if code:
            raise _failed("cuStreamWriteValue64", code)

    def write_both(self, first: int, value: int, second: int, other: int) -> None:
        """Two of them in one call. Raises `RuntimeError`."""
        pair = self._pair
        pair[1], pair[2], pair[_STORE_WORDS + 1], pair[_STORE_WORDS + 2] = first, value, second, other
        code = self._both(self._pointer, 2, self._pair_at, 0)
        if code:
            raise _failed("cuStreamBatchMemOp", code)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """The driver's own copy. Raises `RuntimeError`."""
        self._target.value, self._source.value, self._size.value = target, source, nbytes
        code = self._copy(self._target, self._source, self._size, self._pointer)
        if code:
            raise _failed("cuMemcpyDtoDAsync", code)

    def follow(self, other: int) -> None:
        """Wait for what another stream has been given so far. Raises `RuntimeError`."""
        # The wait holds what the event recorded; recording it anew for the next copy does not change it.
        check(cu.cuEventRecord(self._event, other), "cuEventRecord")
        check(cu.cuStreamWaitEvent(self.handle, self._event, 0), "cuStreamWaitEvent")

    def fault(self) -> str | None:
        """The name of the error that the stream, and with it the context, has died of."""
        code = self._query(self._pointer)
        return None if code in (_SUCCESS, _NOT_READY) else str(_failed("a copy", code))

    def synchronize(self) -> None:
        """Block until all of it is done, well or badly."""
        cu.cuStreamSynchronize(self.handle)

    def close(self) -> None:
        """Destroy the stream and its event; what is under way has ended."""
        cu.cuEventDestroy(self._event)
        cu.cuStreamDestroy(self.handle)


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@final
class Launcher:
    """One loaded kernel whose parameters have 8 bytes each. The caller locks, and sets the context.

    Triton appends pointers of its own (scratch memory) to a kernel's parameters; how many depends on
    its version, so the driver is asked, and they are passed as null, which is right for kernels that
    want none.
    """

    def __init__(self, device: Device, stream: Stream, kernel: Compiled, arguments: int) -> None:
        self.kernel = kernel
        self.span_bytes = kernel.span_words * kernel.word_bytes
        self._module = check(cu.cuModuleLoadData(kernel.cubin), "cuModuleLoadData")
        function = check(cu.cuModuleGetFunction(self._module, kernel.name.encode()), "cuModuleGetFunction")
        check(cu.cuFuncGetParamInfo(function, arguments - 1), "cuFuncGetParamInfo")
        count = arguments
        while cu.cuFuncGetParamInfo(function, count)[0] == cu.CUresult.CUDA_SUCCESS:
            count += 1
        self._values = (ctypes.c_uint64 * count)()
        pointers = [ctypes.addressof(self._values) + 8 * index for index in range(count)]
        self._pointers = (ctypes.c_void_p * count)(*pointers)
        self._config = _LaunchConfig(
            1, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream.address, None, 0
        )
        self._pack = struct.Struct(f"<{arguments}Q").pack_into
        self._launch = device.calls.cuLaunchKernelEx
        self._call = (
            ctypes.byref(self._config),
            ctypes.c_void_p(int(function)),
            ctypes.byref(self._pointers),
            ctypes.c_void_p(),
        )

    def launch(self, programs: int, *arguments: int) -> None:
        """Start `programs` blocks. Raises `RuntimeError`."""
        self._pack(self._values, 0, *arguments)
        self._config.grid_x = programs
        code = self._launch(*self._call)
        if code:
            raise _failed(f"cuLaunchKernelEx of {programs} programs", code)

    def close(self) -> None:
        """Unload the compiled module; no launch may be under way."""
        cu.cuModuleUnload(self._module)
