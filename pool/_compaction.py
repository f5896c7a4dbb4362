"""Moving whole page envelopes inside the arena."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np
import torch
from kvarena.pool._free_pages import Pages

if TYPE_CHECKING:
    from kvarena.pool.unified_kv_pool import UnifiedKVPool

__all__ = ["PageMover"]

# Bytes that one batched move may stage, so that compaction never needs a second pool.
_STAGING_BYTES = 64 << 20


@final
class PageMover:
    """Copies page envelopes of one sub-pool by physical page.

    Rows are read as the widest integer that divides an envelope, since an
    indexed copy's speed is set by its elements, not by its bytes.
    """

    __slots__ = ("_batch", "_rows", "moved_pages")

    def __init__(self, pool: UnifiedKVPool, sub_pool_name: str) -> None:
        nbytes = pool.page_bytes(sub_pool_name)
        pages = pool.reserved_num_pages(sub_pool_name)
        wide = next(
            dtype
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
            if nbytes % dtype.itemsize == 0
        )
        self._rows = pool.raw[: pages * nbytes].view(wide).view(pages, nbytes // wide.itemsize)
        self._batch = max(1, _STAGING_BYTES // nbytes)
        self.moved_pages = 0

    def move(self, source: Pages, target: Pages) -> None:
        """Copy page `source[i]` to page `target[i]`, as if all were read before any is written."""
        count = len(source)
        batch = self._batch
        # Batches run one after the other, which is only "read first" when no page is in both sets.
        if count > batch and np.isin(source, target).any():
            batch = count
        for start in range(0, count, batch):
            src = self._index(source[start : start + batch])
            dst = self._index(target[start : start + batch])
            self._rows.index_copy_(0, dst, self._rows.index_select(0, src))
        self.moved_pages += count

    def _index(self, pages: Pages) -> torch.Tensor:
        host = torch.from_numpy(pages)
        if self._rows.device.type == "cpu":
            return host
        return host.pin_memory().to(self._rows.device, non_blocking=True)
