"""Sets of address ranges that are asked about on every submission."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import final

import numpy as np
from kvarena.transfer.protocol import Int64, Region
from kvarena.transfer.registration.regions import coalesce

__all__ = ["Intervals", "PageBounds", "highest"]

_UINT64 = np.dtype(np.uint64)
_maximum = np.maximum.reduce


@final
class Intervals:
    """The union of regions; adjacent ones are one, as this engine crosses seams. Immutable."""

    __slots__ = ("_ends", "_ends_array", "_starts", "_starts_array")

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        merged = coalesce(regions)
        self._starts = [region.address for region in merged]
        self._ends = [region.end for region in merged]
        self._starts_array = np.array(self._starts, np.int64)
        self._ends_array = np.array(self._ends, np.int64)

    def covers(self, start: int, end: int) -> bool:
        """Whether every byte of ``[start, end)`` is in the union."""
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and end <= self._ends[index]

    def touches(self, start: int, end: int) -> bool:
        """Whether any byte of the non-empty ``[start, end)`` is in the union."""
        index = bisect_right(self._starts, end - 1) - 1
        return index >= 0 and self._ends[index] > start

    def pages_from(self, base: int, page_bytes: int) -> int:
        """How many pages from an address on are inside, one after the other."""
        index = bisect_right(self._starts, base) - 1
        return max(0, (self._ends[index] - base) // page_bytes) if index >= 0 else 0

    def first_outside(self, starts: Int64, lengths: Int64) -> int | None:
        """The index of the first range that is not inside, or None; an empty range may be anywhere."""
        if not self._starts:
            outside = lengths > 0
        else:
            index = np.searchsorted(self._starts_array, starts, side="right") - 1
            # Not by the ranges' ends, which may lie past what 64 bits hold.
            outside = (index < 0) | (lengths > self._ends_array[index] - starts)
            outside &= lengths > 0
        where = np.flatnonzero(outside)
        return int(where[0]) if where.size else None

    def covers_pages(self, base: int, pages: Int64, page_bytes: int) -> bool:
        """Whether every page of a non-empty list is inside."""
        # One pass instead of two: as unsigned, a negative page is a huge one. What lies between the
        # base and the highest page is nearly always one interval.
        high = highest(pages)
        if self.covers(base, base + (high + 1) * page_bytes):
            return True
        if base + (high + 1) * page_bytes >= 1 << 63:
            return False
        starts = base + pages * page_bytes
        return self.first_outside(starts, np.full_like(starts, page_bytes)) is None


@final
class PageBounds:
    """`Intervals.pages_from` of what was asked last: one pool asks the same again and again."""

    __slots__ = ("_base", "_intervals", "_page_bytes", "_pages")

    def __init__(self) -> None:
        self._intervals: Intervals | None = None
        self._base = self._page_bytes = self._pages = 0

    def pages(self, intervals: Intervals, base: int, page_bytes: int) -> int:
        """Whole pages of `page_bytes` from `base` that the intervals hold; the last answer is remembered."""
        if intervals is not self._intervals or base != self._base or page_bytes != self._page_bytes:
            self._pages = intervals.pages_from(base, page_bytes)
            self._intervals, self._base, self._page_bytes = intervals, base, page_bytes
        return self._pages


def highest(pages: Int64) -> int:
    """Of a list of page ids, -1 for none; a negative one counts as huge."""
    return int(_maximum(pages.view(_UINT64))) if pages.size else -1
