"""Memory for tests: a range of addresses of which only the first bytes are backed."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
from kvarena.transfer.protocol import Region

__all__ = ["HostMemory", "assert_same_bytes", "leftovers"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_NORESERVE = 0x4000


class HostMemory:
    """Reserved addresses of this process with a backed prefix; touching the rest faults.

    It stands in for an arena on the host where only bytes matter. Another kind of memory (a device's)
    is tested by giving `TransferEngineContract.memory_factory` a class with these members.

    Parameters
    ----------
    reserved_bytes, backed_bytes : int
        Rounded up to whole pages of the system.
    """

    def __init__(self, reserved_bytes: int, backed_bytes: int) -> None:
        self.reserved_bytes = _whole(reserved_bytes)
        self.backed_bytes = 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _libc.mmap(None, self.reserved_bytes, 0, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        self.base = int(address)
        self.grow(backed_bytes)

    @property
    def backed(self) -> Region:
        """The bytes that have memory."""
        return Region(self.base, self.backed_bytes)

    def grow(self, backed_bytes: int) -> None:
        """Back a longer prefix."""
        backed_bytes = _whole(backed_bytes)
        if _libc.mprotect(self.base, backed_bytes, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
        self.backed_bytes = backed_bytes

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes there."""
        ctypes.memmove(self.base + offset, data, len(data))

    def read(self, offset: int, nbytes: int) -> bytes:
        """Take bytes from there."""
        return ctypes.string_at(self.base + offset, nbytes)

    def close(self) -> None:
        """Give the addresses back; a second call does nothing."""
        if self.base:
            _libc.munmap(self.base, self.reserved_bytes)
            self.base = 0
            self.backed_bytes = 0


def assert_same_bytes(actual: bytes, expected: bytes) -> None:
    """Compare the contents of memory: how many bytes differ, and which are the first.

    For a plain ``assert a == b``, pytest lays both out line by line and looks for their differences, with
    ``-v`` or where ``CI`` is set: for 2 MiB that takes minutes.

    Raises
    ------
    AssertionError
        They differ, with numpy's account of it.
    """
    __tracebackhide__ = True
    np.testing.assert_array_equal(np.frombuffer(actual, np.uint8), np.frombuffer(expected, np.uint8))


def leftovers() -> tuple[int, int, int]:
    """Open file descriptors, mappings and threads of this process: what a leak would add to."""
    status = Path("/proc/self/status").read_text()
    threads = int(status.split("Threads:")[1].split()[0])
    mappings = Path("/proc/self/maps").read_text().count("\n")
    return len(os.listdir("/proc/self/fd")), mappings, threads


def _whole(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
