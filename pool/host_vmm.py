"""Virtual memory of the host: memfds mapped into an inaccessible reservation.

A real backend, not a fake: bytes without memory fault, memory is committed
when a handle is created, and handles travel between processes as file
descriptors, as CUDA's do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, final

from kvarena.pool._counts import as_count
from kvarena.pool._host_memory import available_bytes
from kvarena.pool.errors import (
    DescriptorLimitError,
    DriverError,
    MappingLeftError,
    OutOfMemoryError,
    UnknownHandleError,
)

if TYPE_CHECKING:
    import torch

__all__ = ["HostVmm"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Not in Python's mmap module (linux/mman.h, the same on x86-64 and arm64).
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_INACCESSIBLE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value


@final
class HostVmm:
    """A `Driver` over the host's memory (Linux).

    Parameters
    ----------
    memory_limit : int, optional
        Bytes that all live handles of this driver may hold together, as if it
        were a device of that size. None: what the machine can give.
    granularity : int
        Bytes; a power of two and a multiple of the system's page. Set it to
        2 MiB to behave as CUDA does.

    Raises
    ------
    DriverError
        `granularity` or `memory_limit` cannot be used.
    """

    name = "host"
    rdma_capable = True
    fresh_is_zero = True

    def __init__(self, memory_limit: int | None = None, granularity: int = mmap.PAGESIZE) -> None:
        size = as_count(granularity) or 0
        if size < mmap.PAGESIZE or size & (size - 1):
            raise DriverError(
                "HostVmm",
                "EINVAL",
                f"granularity is {granularity!r}",
                fix=f"Use a power of two that is at least {mmap.PAGESIZE}.",
            )
        limit = as_count(memory_limit)
        if memory_limit is not None and (limit is None or limit < 0):
            raise DriverError(
                "HostVmm", "EINVAL", f"memory_limit is {memory_limit!r}", fix="Use 0 or more bytes."
            )
        self.granularity = size
        self.memory_limit = limit
        self._reservations: dict[int, int] = {}
        self._handles: dict[int, _Handle] = {}
        self._mappings: dict[int, _Handle] = {}
        self._next_handle = itertools.count(1)  # never reused, so a stale one is caught

    @property
    def device(self) -> torch.device:
        """Always the CPU."""
        import torch

        return torch.device("cpu")

    @property
    def live_bytes(self) -> int:
        """Bytes that handles made here hold: not yet released, or still mapped somewhere."""
        held = {*self._handles.values(), *self._mappings.values()}
        return sum(handle.nbytes for handle in held if not handle.imported)

    def reserve(self, nbytes: int) -> int:
        """See `Driver.reserve`."""
        self._check_size("mmap", nbytes)
        # The kernel aligns to its own page only: take more and trim both ends.
        slack = self.granularity - mmap.PAGESIZE
        raw = self._mmap(None, nbytes + slack, _PROT_NONE, _INACCESSIBLE, -1)
        address = -(-raw // self.granularity) * self.granularity
        try:
            if address > raw:
                self._munmap(raw, address - raw)
            if address < raw + slack:
                self._munmap(address + nbytes, raw + slack - address)
        except BaseException:
            self._munmap(raw, nbytes + slack)
            raise
        self._reservations[address] = nbytes
        return address

    def release_reservation(self, address: int, nbytes: int) -> None:
        """See `Driver.release_reservation`."""
        if self._reservations.get(address) != nbytes:
            raise DriverError("munmap", "EINVAL", f"{nbytes} bytes at {address:#x} are not one reservation")
        mapped = [start for start in list(self._mappings) if address <= start < address + nbytes]
        if mapped:
            raise DriverError("munmap", "EBUSY", f"{len(mapped)} handles are still mapped at {address:#x}")
        self._munmap(address, nbytes)
        del self._reservations[address]

    def create(self, nbytes: int) -> int:
        """See `Driver.create`; the memory is committed, and zero."""
        self._check_size("memfd_create", nbytes)
        # Asked first: a memfd has no limit of its own, so the machine would be driven to its OOM killer.
        free = self.free_bytes()
        if nbytes > free:
            raise OutOfMemoryError("memfd_create", "ENOMEM", requested=nbytes, free=free)
        try:
            fd = os.memfd_create("kvarena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            DescriptorLimitError.raise_for(error, "memfd_create")
            raise DriverError("memfd_create", _name(error.errno)) from error
        try:
            os.posix_fallocate(fd, 0, nbytes)
            # So that a peer that holds the descriptor cannot truncate the memory beneath us.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise OutOfMemoryError(
                    "posix_fallocate", _name(error.errno), requested=nbytes, free=self.free_bytes()
                ) from error
            raise DriverError("posix_fallocate", _name(error.errno), f"{nbytes} bytes") from error
        except BaseException:
            os.close(fd)
            raise
        return self._keep(_Handle(fd, nbytes, imported=False))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """See `Driver.map`. Access is set in a second step, as on CUDA."""
        record = self._handle("mmap", handle)
        self._check_mappable(address, nbytes, record)
        self._mmap(address, nbytes, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, record.fd)
        self._mappings[address] = record
        try:
            self._set_access(address, nbytes)
        except BaseException as error:
            try:
                self.unmap(address, nbytes)
            except DriverError as second:
                raise MappingLeftError(second.op, second.code, f"{second.detail}, after: {error}") from error
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """See `Driver.unmap`; the addresses stay reserved."""
        record = self._mappings.get(address)
        if record is None or record.nbytes != nbytes:
            raise DriverError("mmap", "EINVAL", f"{nbytes} bytes at {address:#x} are not one mapped handle")
        self._unmap(address, nbytes)
        del self._mappings[address]

    def is_mapped(self, address: int, nbytes: int) -> bool:
        """See `Driver.is_mapped`."""
        record = self._mappings.get(address)
        return record is not None and record.nbytes == nbytes

    def release(self, handle: int) -> None:
        """See `Driver.release`."""
        record = self._handle("close", handle)
        del self._handles[handle]
        os.close(record.fd)

    def export_fd(self, handle: int) -> int:
        """See `Driver.export_fd`."""
        record = self._handle("dup", handle)
        return _dup(record.fd)

    def import_fd(self, fd: int, nbytes: int) -> int:
        """See `Driver.import_fd`. Only a sealed memfd of exactly this size is taken."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
        except (OSError, ValueError) as error:
            code = _name(error.errno) if isinstance(error, OSError) else "EBADF"
            raise DriverError("import_fd", code, f"descriptor {fd} is not a memfd") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise DriverError("import_fd", "EPERM", f"descriptor {fd} could be truncated by its owner")
        if size != nbytes:
            raise DriverError("import_fd", "EINVAL", f"the memory has {size} bytes, {nbytes} were expected")
        return self._keep(_Handle(_dup(fd), nbytes, imported=True))

    def free_bytes(self) -> int:
        """See `Driver.free_bytes`: what the limit leaves, and never more than the machine has."""
        free = available_bytes()
        if self.memory_limit is not None:
            free = min(free, self.memory_limit - self.live_bytes)
        return max(0, free // self.granularity * self.granularity)

    def zero(self, address: int, nbytes: int) -> None:
        """See `Driver.zero`; bytes without memory are refused, where memset would crash."""
        self._check_backed("memset", address, nbytes)
        ctypes.memset(address, 0, nbytes)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See `Driver.tensor`; touching bytes without memory is a segmentation fault."""
        import torch

        span = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(span, dtype=torch.uint8)

    def _unmap(self, address: int, nbytes: int) -> None:
        self._mmap(address, nbytes, _PROT_NONE, _INACCESSIBLE | _MAP_FIXED, -1)

    def _set_access(self, address: int, nbytes: int) -> None:
        if _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
            _fail("mprotect", f"{nbytes} bytes at {address:#x}")

    def _mmap(self, address: int | None, nbytes: int, prot: int, flags: int, fd: int) -> int:
        result = _libc.mmap(address, nbytes, prot, flags, fd, 0)
        if result == _MAP_FAILED:
            _fail("mmap", f"{nbytes} bytes" + (f" at {address:#x}" if address else ""))
        return int(result)

    def _munmap(self, address: int, nbytes: int) -> None:
        if _libc.munmap(address, nbytes) != 0:
            _fail("munmap", f"{nbytes} bytes at {address:#x}")

    def _keep(self, record: _Handle) -> int:
        handle = next(self._next_handle)
        self._handles[handle] = record
        return handle

    def _handle(self, op: str, handle: int) -> _Handle:
        record = self._handles.get(handle)
        if record is None:
            raise UnknownHandleError(op, "EBADF", f"handle {handle} does not exist or was released")
        return record

    def _check_size(self, op: str, nbytes: int) -> None:
        size = as_count(nbytes) or 0
        if size <= 0 or size % self.granularity:
            raise DriverError(
                op, "EINVAL", f"{nbytes!r} is not a positive multiple of the granularity {self.granularity}"
            )
        if size > sys.maxsize:  # ctypes would pass on the lower 64 bits
            raise DriverError(op, "ENOMEM", f"{nbytes} bytes are more than there are addresses")

    def _check_mappable(self, address: int, nbytes: int, record: _Handle) -> None:
        if nbytes != record.nbytes:
            raise DriverError("mmap", "EINVAL", f"the handle has {record.nbytes} bytes, not {nbytes}")
        if address % self.granularity:
            raise DriverError("mmap", "EINVAL", f"{address:#x} is not a multiple of {self.granularity}")
        if not any(
            start <= address and address + nbytes <= start + size
            for start, size in list(self._reservations.items())
        ):
            raise DriverError("mmap", "EINVAL", f"{nbytes} bytes at {address:#x} are not in one reservation")
        for start, other in list(self._mappings.items()):
            if start < address + nbytes and address < start + other.nbytes:
                raise DriverError("mmap", "EEXIST", f"{nbytes} bytes at {address:#x} are already mapped")

    def _check_backed(self, op: str, address: int, nbytes: int) -> None:
        end = address + nbytes
        for start, record in sorted(self._mappings.items()):
            if start <= address < start + record.nbytes:
                address = start + record.nbytes
        if address < end:
            raise DriverError(op, "EFAULT", f"{end - address} bytes at {address:#x} have no memory")


@dataclass(eq=False)
class _Handle:
    fd: int
    nbytes: int
    imported: bool


def _dup(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        DescriptorLimitError.raise_for(error, "dup")
        raise DriverError("dup", _name(error.errno)) from error


def _name(code: int | None) -> str:
    return errno.errorcode.get(code or 0, str(code))


def _fail(op: str, detail: str) -> NoReturn:
    raise DriverError(op, _name(ctypes.get_errno()), detail)
