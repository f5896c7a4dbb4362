"""Pinned memory that kernels read their page ids from while they run, and the count of finished copies."""

from __future__ import annotations

import ctypes
from typing import TypeAlias, final

import numpy as np
from cuda.bindings import driver as cu
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.copy.clock import await_clock
from kvarena.transfer.same_host.copy.launch import Stream, check

__all__ = ["TABLE_WORDS", "Table", "Tables"]

TABLE_WORDS = 8192
"""Of 8 bytes: pages of one launch."""
_TABLES = 32
_COUNT_BYTES = 4096


Table: TypeAlias = tuple[Int64, int]
"""Its words, and their address."""


@final
class Tables:
    """Tables, each of which is used again when the launch that read it has ended.

    The caller locks, and sets the context.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        nbytes = _TABLES * TABLE_WORDS * 8
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        self._address = int(check(cu.cuMemHostAlloc(_COUNT_BYTES + nbytes, flags), "cuMemHostAlloc"))
        self.count_address = self._address
        """Where launches store their numbers when they have ended."""
        count = (ctypes.c_uint64 * 1).from_address(self._address)
        self._count = memoryview(count).cast("B").cast("Q")
        self._count[0] = 0
        words = (ctypes.c_uint8 * nbytes).from_address(self._address + _COUNT_BYTES)
        table = np.frombuffer(memoryview(words), np.int64)
        self._tables: list[Table] = [
            (table[start : start + TABLE_WORDS], self._address + _COUNT_BYTES + start * 8)
            for start in range(0, _TABLES * TABLE_WORDS, TABLE_WORDS)
        ]
        self._users = [0] * _TABLES

    @property
    def ended(self) -> int:
        """The number of the last launch that has ended."""
        return self._count[0]

    def has_ended(self, number: int) -> bool:
        """See `Clock.has_ended`; it knows nothing of failures."""
        return self._count[0] >= number

    def take(self, number: int) -> Table:
        """A table that nothing reads any more, for the launch of that number."""
        # The first that is free, so that those which are used are few, and in the processor's cache.
        ended, users = self._count[0], self._users
        for index in range(_TABLES):
            if users[index] <= ended:
                break
        else:
            index = users.index(min(users))
            self._await(users[index])
        users[index] = number
        return self._tables[index]

    def _await(self, number: int) -> None:
        while not await_clock(self.has_ended, number, 1.0):
            if why := self._stream.fault():
                raise RuntimeError(why)

    def close(self) -> None:
        """Free the memory."""
        check(cu.cuMemFreeHost(self._address), "cuMemFreeHost")
