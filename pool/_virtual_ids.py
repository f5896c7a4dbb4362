"""The virtual pages that are free to be given out."""

from __future__ import annotations

from typing import final

import numpy as np
from kvarena.pool._free_pages import Pages

__all__ = ["VirtualIds"]


@final
class VirtualIds:
    """A stack of free virtual pages; what was freed last is given out first.

    Parameters
    ----------
    table_pages : int
        The largest virtual page that will ever be used, plus one.
    first : int
        The smallest.
    """

    __slots__ = ("_count", "_first", "_limit", "_stack")

    def __init__(self, table_pages: int, *, first: int) -> None:
        self._stack = np.empty(table_pages, dtype=np.int64)
        self._first = first
        self._limit = self._count = 0

    @property
    def available(self) -> int:
        """Pages that can be given out."""
        return self._count

    def reset(self, limit: int) -> None:
        """All of ``[first, limit)`` are free; the smallest comes first."""
        self._limit = limit
        if len(self._stack):
            self._count = max(0, limit - self._first)
            self._stack[: self._count] = np.arange(limit - 1, limit - 1 - self._count, -1)

    def take(self, count: int) -> Pages:
        """Give out `count` pages; there are that many."""
        start = self._count - count
        pages = self._stack[start : self._count][::-1].copy()
        self._count = start
        return pages

    def put_back(self, pages: Pages) -> None:
        """Take pages back; those beyond the limit, given out before it fell, are retired."""
        if self._limit < len(self._stack):
            pages = pages[pages < self._limit]
        self._stack[self._count : self._count + len(pages)] = pages[::-1]
        self._count += len(pages)

    def set_limit(self, limit: int, v2p: Pages) -> None:
        """Change the bound; what `v2p` maps stays given out. O(pool)."""
        self._limit = limit
        free = np.flatnonzero(v2p[self._first : limit] < 0) + self._first
        self._count = len(free)
        self._stack[: self._count] = free[::-1]

    def violations(self, v2p: Pages) -> list[str]:
        """What does not add up. O(pool)."""
        free = np.sort(self._stack[: self._count])
        expected = np.flatnonzero(v2p[self._first : self._limit] < 0) + self._first
        if not np.array_equal(free, expected):
            return [
                f"{len(free)} virtual pages are free by the stack ({len(np.unique(free))} distinct), "
                f"{len(expected)} by the table"
            ]
        return []
