"""Live and free pages of a hybrid-SWA allocator of SGLang's, from its own counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from kvarena.plugin.observe.status.usage import PageUsage

__all__ = ["SglangPageUsage"]


@final
class SglangPageUsage:
    """Pages of both sides of a ``UnifiedSWATokenToKVPoolAllocator``.

    A side's free pages are what it could get now if the other side took nothing: bytes that the other side
    has borrowed are not among them, holes that SGLang would compact for the allocation are.

    It is asked on other threads than the scheduler's. So it reads host-side counters alone, and none of
    SGLang's functions that remember their answer: one remembered here, of a state that has changed
    meanwhile, would be taken for true by the next allocation.

    Parameters
    ----------
    allocator : sglang's UnifiedSWATokenToKVPoolAllocator
        Of a pool that has its final size.
    """

    def __init__(self, allocator: Any) -> None:
        self._full = allocator.full_attn_allocator
        self._window = allocator.swa_attn_allocator

    def page_usage(self) -> Mapping[str, PageUsage]:
        """Pages of each sub-pool, by its name."""
        return {side.sub_pool_name: self._usage(side) for side in (self._full, self._window)}

    def _usage(self, side: Any) -> PageUsage:
        live = int(side.allocated_count()) // int(side.page_size)
        tokens = int(side._available_tokens(extra_gap_bytes=side._peer_drainable_hole_bytes()))
        # A page needs an id: the full side mints them, and the window side binds each of them once.
        ids = int(side.num_virtual_ids) - int(self._full.min_page_index) - live
        return PageUsage(live, max(0, min(tokens // int(side.page_size), ids)))
