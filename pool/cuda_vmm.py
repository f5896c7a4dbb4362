"""Virtual memory of a CUDA device, through the driver's own interface.

cuda.core's VirtualMemoryResource cannot reserve without backing, and moves a
buffer that it grows; so ``cuda.bindings.driver`` is called directly.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from kvarena.pool import _cuda_api as cuda
from kvarena.pool.errors import (
    DescriptorLimitError,
    DriverError,
    DriverUnavailableError,
    MappingLeftError,
    OutOfMemoryError,
    UnknownHandleError,
)

if TYPE_CHECKING:
    import torch

__all__ = ["CudaVmm"]

_log = logging.getLogger(__name__)


@final
class CudaVmm:
    """A `Driver` over one CUDA device.

    Handles are created so that they can be exported as POSIX file
    descriptors, and, where the device allows it, reached by network cards
    (``gpuDirectRDMACapable``) and exported as fabric handles.

    Parameters
    ----------
    device : torch.device or str or int
        The device; without an index, torch's current one.

    Raises
    ------
    DriverUnavailableError
        No driver, no such device, or one without virtual memory management.
    """

    name = "cuda"
    fresh_is_zero = False

    def __init__(self, device: torch.device | str | int = "cuda") -> None:
        self._cuda = cuda.load()
        self.device = _torch_device(device)
        self._ordinal = int(cuda.call("cuDeviceGet", self.device.index))
        for attribute in ("VIRTUAL_MEMORY_MANAGEMENT", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"):
            if not cuda.has_attribute(self._ordinal, f"{attribute}_SUPPORTED"):
                raise DriverUnavailableError(
                    "cuDeviceGetAttribute",
                    "CUDA_ERROR_NOT_SUPPORTED",
                    f"{self.device} has no {attribute.lower()}",
                    fix="Use an eager pool on this device.",
                )
        self._context = cuda.primary_context(self._ordinal)
        self.rdma_capable = cuda.has_attribute(self._ordinal, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
        self._fd_type = self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._prop = self._allocation_prop(int(self._fd_type))
        self._access = self._access_desc()
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(cuda.call("cuMemGetAllocationGranularity", self._prop, minimum))
        handle_types = self._handle_types()
        self.fabric_capable = handle_types != int(self._fd_type)
        self._prop = self._allocation_prop(handle_types)
        self.cached_bytes_released = 0

    def reserve(self, nbytes: int) -> int:
        """See `Driver.reserve`."""
        return int(cuda.call("cuMemAddressReserve", nbytes, self.granularity, 0, 0, detail=f"{nbytes} bytes"))

    def release_reservation(self, address: int, nbytes: int) -> None:
        """See `Driver.release_reservation`."""
        cuda.call("cuMemAddressFree", address, nbytes, detail=f"{nbytes} bytes at {address:#x}")

    def create(self, nbytes: int) -> int:
        """See `Driver.create`. Torch's cached free blocks are released before it gives up."""
        try:
            return self._create(nbytes)
        except DriverError as error:
            if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
        try:
            if self.release_cached():
                return self._create(nbytes)
        except DriverError as error:
            if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
        raise OutOfMemoryError(
            "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", requested=nbytes, free=self._free_bytes()
        )

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """See `Driver.map`."""
        cuda.call("cuMemMap", address, nbytes, 0, handle, 0, detail=f"{nbytes} bytes at {address:#x}")
        try:
            self._set_access(address, nbytes)
        except BaseException as error:
            try:
                self._unmap(address, nbytes)
            except DriverError as second:
                raise MappingLeftError(second.op, second.code, f"{second.detail}, after: {error}") from error
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """See `Driver.unmap`."""
        self.synchronize()
        self._unmap(address, nbytes)

    def is_mapped(self, address: int, nbytes: int) -> bool:
        """See `Driver.is_mapped`; CUDA tells only whether some handle is mapped at `address`."""
        try:
            handle = cuda.call("cuMemRetainAllocationHandle", address)
        except DriverError as error:
            if error.code != "CUDA_ERROR_INVALID_VALUE":
                raise
            return False
        cuda.call("cuMemRelease", handle)
        return True

    def release(self, handle: int) -> None:
        """See `Driver.release`."""
        detail = f"handle {handle:#x}"
        try:
            cuda.call("cuMemRelease", handle, detail=detail)
        except DriverError as error:
            if error.code != "CUDA_ERROR_INVALID_VALUE":
                raise
            raise UnknownHandleError(error.op, error.code, detail) from error

    def export_fd(self, handle: int) -> int:
        """See `Driver.export_fd`."""
        with _descriptors("cuMemExportToShareableHandle"):
            fd = int(cuda.call("cuMemExportToShareableHandle", handle, self._fd_type, 0))
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int, nbytes: int) -> int:
        """See `Driver.import_fd`; CUDA does not tell a handle's size, so a wrong one fails in `map`."""
        op = "cuMemImportFromShareableHandle"
        with _descriptors(op):
            return int(cuda.call(op, fd, self._fd_type, detail=f"descriptor {fd}"))

    def free_bytes(self) -> int:
        """See `Driver.free_bytes`. Torch's cached free blocks are released first, as nobody else could.

        The largest handle is about 3 MiB smaller than what the driver calls
        free (measured on an H200), so two granules are taken off.
        """
        self.release_cached()
        return max(0, self._free_bytes() // self.granularity - 2) * self.granularity

    def zero(self, address: int, nbytes: int) -> None:
        """See `Driver.zero`; returns when it is done, so that every stream sees zeros."""
        with cuda.current_context(self._context):
            cuda.call("cuMemsetD8Async", address, 0, nbytes, 0, detail=f"{nbytes} bytes at {address:#x}")
            cuda.call("cuStreamSynchronize", 0)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See `Driver.tensor`; the first byte must be mapped."""
        import torch

        return torch.as_tensor(_Span(address, nbytes), device=self.device)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        with cuda.current_context(self._context):
            cuda.call("cuCtxSynchronize")

    def release_cached(self) -> int:
        """Give the blocks that torch caches, but does not use, back to the device.

        Returns
        -------
        int
            Bytes that torch let go; also summed in `cached_bytes_released`.
        """
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        if torch.cuda.is_current_stream_capturing():  # the allocator must not be touched then
            return 0
        before = torch.cuda.memory_reserved(self.device)
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()
        released = max(0, before - torch.cuda.memory_reserved(self.device))
        if released:
            self.cached_bytes_released += released
            _log.debug("Released %d bytes that torch had cached on %s.", released, self.device)
        return released

    def _create(self, nbytes: int) -> int:
        with _descriptors("cuMemCreate"):
            return int(cuda.call("cuMemCreate", nbytes, self._prop, 0, detail=f"{nbytes} bytes"))

    def _unmap(self, address: int, nbytes: int) -> None:
        cuda.call("cuMemUnmap", address, nbytes, detail=f"{nbytes} bytes at {address:#x}")

    def _set_access(self, address: int, nbytes: int) -> None:
        cuda.call(
            "cuMemSetAccess", address, nbytes, [self._access], 1, detail=f"{nbytes} bytes at {address:#x}"
        )

    def _free_bytes(self) -> int:
        with cuda.current_context(self._context):
            free, _ = cuda.call("cuMemGetInfo")
        return int(free)

    def _location(self) -> Any:
        location = self._cuda.CUmemLocation()
        location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._ordinal
        return location

    def _allocation_prop(self, handle_types: int) -> Any:
        prop = self._cuda.CUmemAllocationProp()
        prop.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = self._location()
        prop.requestedHandleTypes = self._fd_type if handle_types == int(self._fd_type) else handle_types
        # Without it ibv_reg_mr answers "Bad address" for VMM memory (vllm#29569).
        prop.allocFlags.gpuDirectRDMACapable = int(self.rdma_capable)
        return prop

    def _access_desc(self) -> Any:
        access = self._cuda.CUmemAccessDesc()
        access.location = self._location()
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _handle_types(self) -> int:
        """File descriptors, and fabric handles if this host lets us make them.

        The attribute says what the device can; only an attempt shows whether
        the host has an IMEX channel for it.
        """
        types = self._cuda.CUmemAllocationHandleType
        both = int(self._fd_type) | int(types.CU_MEM_HANDLE_TYPE_FABRIC)
        if not cuda.has_attribute(self._ordinal, "HANDLE_TYPE_FABRIC_SUPPORTED"):
            return int(self._fd_type)
        try:
            handle = cuda.call("cuMemCreate", self.granularity, self._allocation_prop(both), 0)
        except (
            DriverError,
            TypeError,
            ValueError,
            AttributeError,
        ):  # bindings before 13.4 may know no mixture
            return int(self._fd_type)
        self.release(int(handle))
        return both


@contextmanager
def _descriptors(op: str) -> Iterator[None]:
    """Tell a failure for want of file descriptors, which CUDA reports by other names, from all others."""
    try:
        yield
    except DriverError as error:
        if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
            try:
                os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as second:
                DescriptorLimitError.raise_for(second, f"{op} ({error.code})")
        raise


class _Span:
    """Addresses as torch takes them in (CUDA Array Interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def _torch_device(device: torch.device | str | int) -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise DriverUnavailableError(
            "torch.cuda.is_available",
            "False",
            f"torch {torch.__version__} sees no CUDA device",
            fix="Install a torch with CUDA, or use the host driver.",
        )
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type != "cuda":
        raise DriverUnavailableError("CudaVmm", "CUDA_ERROR_INVALID_DEVICE", f"{wanted} is not a CUDA device")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise DriverUnavailableError(
            "CudaVmm", "CUDA_ERROR_INVALID_DEVICE", f"there is no cuda:{index}, only {count} devices"
        )
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.device("cuda", index)
