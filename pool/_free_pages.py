"""Which pages of one sub-pool are in use, and where its frontiers stand."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "PageSpan", "Pages", "edge_above", "edge_below"]

Pages = npt.NDArray[np.int64]

# Pages that share one counter: a search reads the counters first, then only blocks that have a hole.
_SHIFT = 8
BLOCK = 1 << _SHIFT


@final
class PageSpan:
    """The pages ``[low, high)`` between a sub-pool's frontiers: in use, or holes.

    Pages outside the span are free and untouched. An end pool moves one
    frontier (``high`` when it grows up, ``low`` when it grows down) and keeps
    the other; a float may move both. An operation on `k` pages costs O(k),
    plus the counters that a search passes (one per 256 pages).

    Parameters
    ----------
    table_pages : int
        The largest page number that will ever be used, plus one.
    grows_up : bool
        Whether ``high`` is the moving frontier.
    """

    __slots__ = ("_block_used", "_cells", "_grows_up", "ceiling", "floor", "high", "live", "low", "used")

    def __init__(self, table_pages: int, *, grows_up: bool) -> None:
        blocks = -(-table_pages // BLOCK)
        self.used = np.zeros(blocks * BLOCK, dtype=np.uint8)
        self._cells = self.used.reshape(blocks, BLOCK)
        # int64, like the constants that are added: other pairs of types take ufunc.at's slow path.
        self._block_used = np.zeros(blocks, dtype=np.int64)
        self._grows_up = grows_up
        self.floor = self.ceiling = self.low = self.high = 0
        self.live = 0

    @property
    def holes(self) -> int:
        """Free pages behind the frontier."""
        return self.high - self.low - self.live

    def reset(self, floor: int, ceiling: int) -> None:
        """Empty the span; from now on pages in ``[floor, ceiling)`` may be used."""
        self.used.fill(0)
        self._block_used.fill(0)
        self.live = 0
        self.floor, self.ceiling = floor, ceiling
        self._park()

    def set_ceiling(self, ceiling: int) -> tuple[Pages, Pages] | None:
        """Move the upper bound under pages in use.

        Returns
        -------
        (source, target) or None
            Pages that lay at or above the bound, and the pages below that now
            stand for them; the caller moves their bytes. Only in a span that
            grows down; its frontier goes down where holes do not suffice.
        """
        self.ceiling = ceiling
        if self.live == 0:
            self._park()
            return None
        if self._grows_up:
            return None
        source = self.used_between(ceiling, self.high)
        self._unmark(source)
        # The bound is also the kept side: pages between the old and a higher new one become holes.
        self.high = ceiling
        self.low = min(self.low, ceiling)
        self.low -= max(0, len(source) - self.holes)
        if len(source) == 0:
            return None
        target = self.find_holes(len(source))
        self.mark(target)
        self.retract()
        return source, target

    def take(self, count: int) -> Pages:
        """Put `count` pages to use: holes far from the frontier first, then fresh ones at it.

        The caller has made sure that they fit.
        """
        reuse = min(count, self.holes)
        fresh = count - reuse
        parts: list[Pages] = []
        if reuse:
            parts.append(self.find_holes(reuse))
        if fresh:
            if self._grows_up:
                parts.append(np.arange(self.high, self.high + fresh, dtype=np.int64))
                self.high += fresh
            else:
                parts.append(np.arange(self.low - 1, self.low - fresh - 1, -1, dtype=np.int64))
                self.low -= fresh
        pages = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.mark(pages)
        return pages

    def mark(self, pages: Pages) -> None:
        """Note free pages of the span as used."""
        self.used[pages] = 1
        np.add.at(self._block_used, pages >> _SHIFT, 1)
        self.live += len(pages)

    def release(self, pages: Pages) -> None:
        """Note used pages as holes, and retract the frontier when its edge is free."""
        self._unmark(pages)
        self.retract()

    def retract(self) -> None:
        """Move the frontier back over holes; each was freed once, so this costs O(freed) over time."""
        if self.live == 0:
            self._park()
        elif self._grows_up:
            if not self.used[self.high - 1]:
                self.high = edge_above(self.used, self.low, self.high)
        elif not self.used[self.low]:
            self.low = edge_below(self.used, self.low, self.high)

    def find_holes(self, count: int) -> Pages:
        """The `count` holes that are farthest from the frontier; there are that many."""
        first, last = self.low >> _SHIFT, ((self.high - 1) >> _SHIFT) + 1
        free = BLOCK - self._block_used[first:last]
        free[0] -= self.low - first * BLOCK
        free[-1] -= last * BLOCK - self.high
        blocks = np.flatnonzero(free)
        if self._grows_up:
            reach = int(np.searchsorted(np.cumsum(free[blocks]), count)) + 1
            blocks = blocks[:reach] + first
        else:
            reach = int(np.searchsorted(np.cumsum(free[blocks[::-1]]), count)) + 1
            blocks = blocks[-reach:] + first
        cells = np.flatnonzero(self._cells[blocks].reshape(-1) == 0)
        pages: Pages = (blocks[cells >> _SHIFT] << _SHIFT) + (cells & (BLOCK - 1))
        # The outermost blocks reach beyond the span, where free pages are not holes.
        start, stop = np.searchsorted(pages, (self.low, self.high))
        pages = pages[start:stop]
        # Copied, for torch takes no array whose stride is negative.
        return pages[:count] if self._grows_up else pages[::-1][:count].copy()

    def used_between(self, low: int, high: int) -> Pages:
        """Pages in use in ``[low, high)``, ascending. O(high - low)."""
        low, high = max(low, self.low), min(high, self.high)
        if low >= high:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.used[low:high]) + low

    def violations(self) -> list[str]:
        """What does not add up. O(pool): for tests and idle checks."""
        found = []
        used = np.flatnonzero(self.used)
        if len(used) != self.live:
            found.append(f"{len(used)} pages are marked as used, {self.live} are counted")
        if len(used) and not (self.low <= used[0] and used[-1] < self.high):
            found.append(f"pages {used[0]}..{used[-1]} are used outside the span [{self.low}, {self.high})")
        if not self.floor <= self.low <= self.high <= self.ceiling:
            found.append(
                f"the span [{self.low}, {self.high}) leaves its bounds [{self.floor}, {self.ceiling})"
            )
        if not np.array_equal(self._cells.sum(axis=1, dtype=np.int64), self._block_used):
            found.append("a block's counter differs from its pages")
        return found

    def _unmark(self, pages: Pages) -> None:
        self.used[pages] = 0
        np.subtract.at(self._block_used, pages >> _SHIFT, 1)
        self.live -= len(pages)

    def _park(self) -> None:
        self.low = self.high = self.floor if self._grows_up else self.ceiling


def edge_above(marks: npt.NDArray[Any], low: int, high: int) -> int:
    """One past the last non-zero mark in ``[low, high)``, or `low`."""
    chunk = 64  # doubled while nothing is found: near marks are cheap, far ones cost their distance
    while high > low:
        start = max(low, high - chunk)
        hits = np.flatnonzero(marks[start:high])
        if len(hits):
            return start + int(hits[-1]) + 1
        high, chunk = start, chunk * 2
    return low


def edge_below(marks: npt.NDArray[Any], low: int, high: int) -> int:
    """The first non-zero mark in ``[low, high)``, or `high`."""
    chunk = 64
    while low < high:
        stop = min(high, low + chunk)
        hits = np.flatnonzero(marks[low:stop])
        if len(hits):
            return low + int(hits[0])
        low, chunk = stop, chunk * 2
    return high
