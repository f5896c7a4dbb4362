"""Sets of address ranges that are asked about on every submission."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import final

import numpy as np
import numpy.typing as npt
from kvarena.transfer.protocol import Region
from kvarena.transfer.regions import coalesce

__all__ = ["Intervals"]

Int64 = npt.NDArray[np.int64]


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

    def first_outside(self, starts: Int64, lengths: Int64) -> int | None:
        """The index of the first range that is not inside, or None; an empty range may be anywhere."""
        ends = starts + lengths
        if not self._starts:
            outside = lengths > 0
        else:
            index = np.searchsorted(self._starts_array, starts, side="right") - 1
            outside = (index < 0) | (ends > self._ends_array[index])
            outside &= lengths > 0
        where = np.flatnonzero(outside)
        return int(where[0]) if where.size else None

    def covers_pages(self, base: int, pages: Int64, page_bytes: int) -> bool:
        """Whether every page of a non-empty list is inside."""
        # One pass instead of two: as unsigned, a negative page is a huge one. What lies between the
        # base and the highest page is nearly always one interval.
        high = int(np.maximum.reduce(pages.view(np.uint64)))
        if self.covers(base, base + (high + 1) * page_bytes):
            return True
        if base + (high + 1) * page_bytes >= 1 << 63:
            return False
        starts = base + pages * page_bytes
        return self.first_outside(starts, np.full_like(starts, page_bytes)) is None
