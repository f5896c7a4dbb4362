"""How many transfers hold each page in place."""

from __future__ import annotations

from typing import final

import numpy as np
from kvarena.pool._free_pages import Pages, edge_above, edge_below

__all__ = ["PinCounts"]


@final
class PinCounts:
    """A count for each physical page, and the outermost pages that are held.

    Compaction can pack a sub-pool no tighter than its outermost pinned page,
    so both edges are kept ready: ``[low, high)`` holds every pinned page, and
    is ``[table_pages, 0)`` when there is none.
    """

    __slots__ = ("counts", "high", "low", "total")

    def __init__(self, table_pages: int) -> None:
        self.counts = np.zeros(table_pages, dtype=np.int32)
        self.total = 0
        self.low, self.high = table_pages, 0

    def add(self, pages: Pages) -> None:
        """Hold distinct pages once more."""
        if len(pages) == 0:
            return
        self.counts[pages] += 1
        self.total += len(pages)
        self.low = min(self.low, int(pages.min()))
        self.high = max(self.high, int(pages.max()) + 1)

    def remove(self, pages: Pages) -> None:
        """Hold distinct pages, all of them held, once less."""
        if len(pages) == 0:
            return
        self.counts[pages] -= 1
        self.total -= len(pages)
        if self.total == 0:
            self.low, self.high = len(self.counts), 0
        else:
            self.low = edge_below(self.counts, self.low, self.high)
            self.high = edge_above(self.counts, self.low, self.high)
