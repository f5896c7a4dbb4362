"""How large the two sides of a hybrid pool are, and how that changes."""

from __future__ import annotations

from typing import Any

from kvarena.pool._capacity import change_total_bytes
from kvarena.pool._counts import as_count
from kvarena.pool.errors import AllocatorError, LayoutError, PoolSizeError, PoolStateError
from kvarena.pool.multi_ended_allocator import MultiEndedAllocator
from kvarena.pool.unified_kv_pool import UnifiedKVPool

__all__ = ["HybridCapacity"]


class HybridCapacity:
    """What `UnifiedSWATokenToKVPoolAllocator` stands on: both sides, their sizes, and resizing.

    Parameters
    ----------
    pool : UnifiedKVPool
        Eager or reserved.
    full, swa : str
        Names of the two sub-pools.

    Raises
    ------
    LayoutError
        There are no such sub-pools, or they are not the two ends.
    """

    def __init__(self, pool: UnifiedKVPool, full: str, swa: str) -> None:
        self.pool = pool
        self.full_attn_allocator = MultiEndedAllocator(pool, full)
        self.swa_attn_allocator = MultiEndedAllocator(
            pool, swa, is_id_owner=False, num_virtual_pages=pool.reserved_num_pages(full)
        )
        self.page_size = self.full_attn_allocator.page_size
        if self.swa_attn_allocator.page_size != self.page_size:
            raise LayoutError(
                f"{full!r} has {self.page_size} slots a page, {swa!r} {self.swa_attn_allocator.page_size}.",
                fix="Use two sub-pools of attention.",
            )
        self.full_attn_allocator.bind_peer(self.swa_attn_allocator)
        self.swa_attn_allocator._id_source = self.full_attn_allocator
        first, second = self.full_attn_allocator, self.swa_attn_allocator
        self._chain = [first, second] if first.grows_up else [second, first]
        self._set_capacity()

    @property
    def full(self) -> MultiEndedAllocator:
        """The side that owns the ids; `full_attn_allocator` to SGLang."""
        return self.full_attn_allocator

    @property
    def swa(self) -> MultiEndedAllocator:
        """The window's side; `swa_attn_allocator` to SGLang."""
        return self.swa_attn_allocator

    @property
    def size(self) -> int:
        """The smaller of `size_full` and `size_swa`."""
        return min(self.size_full, self.size_swa)

    @property
    def size_full(self) -> int:
        """Tokens that the full side holds when the other is empty."""
        full = self.full_attn_allocator
        return (full.num_pages - full.min_page_index) * self.page_size

    @property
    def size_swa(self) -> int:
        """Tokens that the window side holds when the other needs no bytes; never more than there are ids."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        pages = min(swa.num_pages - swa.min_page_index, full._id_limit - full.min_page_index)
        return pages * self.page_size

    @property
    def max_slots(self) -> int:
        """The bound of token ids, virtual and physical ones of the full side.

        It holds at any time for every id that is out: after a shrink it stays
        above the ids that were given out before, until they are freed.
        """
        return self.full_attn_allocator.max_slots

    def available_size(self) -> int:
        """Tokens that `alloc` can deliver now, what compaction frees included. O(1)."""
        return self._available_pages() * self.page_size

    def full_available_size(self) -> int:
        """Tokens that the full side could take, were the window side to take none."""
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        """Tokens that the window side could take, were the full side to take none."""
        swa = self.swa_attn_allocator
        return min(swa.available_size(), max(0, self.size_swa - swa.allocated_count()))

    def resize(self, config: Any) -> None:
        """Use the size that the pool was finalized to; the tables keep their storage.

        Parameters
        ----------
        config : object
            Its `unified_memory_pool_bytes` is what the pool was finalized to.

        Raises
        ------
        PoolStateError
            The pool is eager, or not final yet.
        PoolSizeError
            The byte count is missing, or is not the pool's.
        AllocatorError
            Tokens are allocated. In every case nothing has changed.
        """
        if not self.pool.post_capture_active:
            raise PoolStateError(
                "The allocator of an eager pool has its size already.",
                fix="Make the pool with post_capture_active=True to size it after capture.",
            )
        given = getattr(config, "unified_memory_pool_bytes", None)
        total = as_count(given)
        if total is None:
            raise PoolSizeError(
                f"The size of the pool is missing: {given!r} is not a byte count.",
                requested=None,
                minimum=self.pool.total_bytes,
                maximum=self.pool.total_bytes,
                fix="Set unified_memory_pool_bytes to what the pool was finalized to.",
            )
        if not self.pool.finalized:
            raise PoolStateError(
                "The pool is not final yet.", fix="Call pool.finalize_backing(config) before resize(config)."
            )
        if total != self.pool.total_bytes:
            raise PoolSizeError(
                f"The allocator was asked for {total} bytes, but the pool has {self.pool.total_bytes}.",
                requested=total,
                minimum=self.pool.total_bytes,
                maximum=self.pool.total_bytes,
                fix="Pass resize() the config that finalize_backing() got.",
            )
        self._require_empty()
        self._set_capacity()

    def revert_resize(self) -> None:
        """Take `resize` back: the capacity of the reservation again, so that finalize can be tried anew.

        Nothing can be allocated then until the next `resize`, since the
        reservation has no memory.

        Raises
        ------
        PoolStateError
            The pool is eager.
        AllocatorError
            Tokens are allocated. In both cases nothing has changed.
        """
        if not self.pool.post_capture_active:
            raise PoolStateError(
                "The allocator of an eager pool was never resized.", fix="Leave it as it is."
            )
        self._require_empty()
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        pages = self.pool.reserved_num_pages(full.sub_pool_name)
        full._set_capacity(pages * self.page_size)
        swa._set_capacity(
            self.pool.reserved_num_pages(swa.sub_pool_name) * self.page_size, virtual_num_pages=pages
        )

    def grow(self) -> None:
        """Use what `pool.grow` added, with pages in use: above the end that grows down they become free.

        Raises
        ------
        PoolStateError
            The pool is not final yet.
        """
        if not self.pool.finalized:
            raise PoolStateError("The pool is not final yet.", fix="Use resize() after finalize_backing().")
        self._change_capacity(self.pool.total_bytes)

    def shrink(self, total_bytes: int) -> int:
        """Use only bytes below `total_bytes`, moving pages in use down; then `pool.shrink` may follow.

        Parameters
        ----------
        total_bytes : int
            The size that the pool will have.

        Returns
        -------
        int
            Pages moved.

        Raises
        ------
        PoolStateError
            The pool is eager, or not final yet.
        PoolSizeError
            Below the floor for one request, more than the pool has, or too little for the pages in use.
        AllocatorError
            Pages that would have to move are pinned. In every case nothing has changed.
        """
        if not self.pool.post_capture_active or not self.pool.finalized:
            raise PoolStateError(
                "Only a pool that was sized after capture, and is final, can shrink.",
                fix="Make it with post_capture_active=True and finalize it.",
            )
        total_bytes = self.pool.check_total_bytes(total_bytes)
        if total_bytes > self.pool.total_bytes:
            raise PoolSizeError(
                f"The pool has {self.pool.total_bytes} bytes and cannot shrink to {total_bytes}.",
                requested=total_bytes,
                minimum=self.pool.floor_bytes,
                maximum=self.pool.total_bytes,
                fix="Use pool.grow() and then grow().",
            )
        return self._change_capacity(total_bytes)

    def _require_empty(self) -> None:
        for side in self._chain:
            if side.allocated_count():
                raise AllocatorError(
                    f"{side.allocated_count()} tokens are allocated in {side.sub_pool_name!r}.",
                    fix="Free them first, or use grow() and shrink().",
                )

    def _set_capacity(self) -> None:
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        full._set_capacity(self.pool.max_slots(full.sub_pool_name))
        swa._set_capacity(self.pool.max_slots(swa.sub_pool_name), virtual_num_pages=full._id_limit)

    def _change_capacity(self, total_bytes: int) -> int:
        return change_total_bytes(
            self._chain, total_bytes, total_bytes // self.full_attn_allocator.page_bytes
        )

    def _available_pages(self) -> int:
        """The largest number of pages that both sides can take together, in closed form.

        Packed, the low side ends where its pages or its last pin do, the high
        side begins likewise, and the two must not overlap: one bound for each
        pair of those.
        """
        full = self.full_attn_allocator
        low, high = self._chain
        if not (low._is_backed() and high._is_backed()):
            return 0
        low_end = low._span.floor + low._span.live
        high_start = high._span.ceiling - high._span.live
        low_bytes, high_bytes = low.page_bytes, high.page_bytes
        return max(
            0,
            min(
                full._ids.available,
                low._span.ceiling - low_end,
                high_start - high._span.floor,
                (high_start * high_bytes - low_end * low_bytes) // (low_bytes + high_bytes),
                high._pins.low * high_bytes // low_bytes - low_end,
                high_start - -(-low._pins.high * low_bytes // high_bytes),
            ),
        )
