"""One virtual id for a token's full-attention page and its sliding-window page."""

from __future__ import annotations

from typing import Literal, final

import torch
from kvarena.pool._counts import as_count
from kvarena.pool._free_group import FreeGroup
from kvarena.pool._free_pages import Pages
from kvarena.pool._hybrid_capacity import HybridCapacity
from kvarena.pool._ids import Ids, PageReader, count_of, tokens_of
from kvarena.pool._room import make_room
from kvarena.pool.errors import AllocatorError
from kvarena.pool.unified_kv_pool import UnifiedKVPool

__all__ = ["UnifiedSWATokenToKVPoolAllocator"]


@final
class UnifiedSWATokenToKVPoolAllocator(FreeGroup, HybridCapacity):
    """Allocates tokens of a hybrid model over both ends of one pool.

    The full side owns the virtual ids. A token's page has a full-attention
    page as long as it is allocated, and a window page until `free_swa` turns
    that into a *tombstone*: the id stays valid, and reading it on the window
    side gives slot 0, the sink. Sides share the bytes between them, so each
    one's availability depends on the other.

    Ids are virtual token ids. `alloc` returns them on the host, and every
    call takes them there without waiting for the device; see
    `MultiEndedAllocator`.

    Parameters
    ----------
    pool : UnifiedKVPool
        It may be eager, or reserved and not final yet; then only `resize` makes ids available.
    full, swa : str
        Names of the two sub-pools, one of which grows up and the other down.

    Raises
    ------
    LayoutError
        There are no such sub-pools, or they are not the two ends.
    """

    def __init__(self, pool: UnifiedKVPool, full: str = "full", swa: str = "swa") -> None:
        FreeGroup.__init__(self)
        HybridCapacity.__init__(self, pool, full, swa)
        self._reader = PageReader(pool.reserved_num_pages(full), self.page_size, f"{full}+{swa}")

    def is_slot_allocated(self, slot: int) -> bool:
        """Whether a virtual token id is in use on the full side."""
        return self.full_attn_allocator.is_slot_allocated(slot)

    # Giving out and taking back

    def alloc(self, need_size: int, *, swa_tail_len: int | None = None) -> torch.Tensor | None:
        """Virtual ids of `need_size` tokens, whole pages, backed on both sides; None when they do not fit.

        Parameters
        ----------
        need_size : int
            Tokens; a multiple of the page size.
        swa_tail_len : int, optional
            Back only the pages of the last so many tokens on the window side,
            and leave the others as tombstones: for a sequence that is longer
            than the window and already computed elsewhere.

        Returns
        -------
        torch.Tensor or None
            int64, on the host.

        Raises
        ------
        AllocatorError
            A count is negative or not whole pages, or the pool has no memory yet.
        """
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        count = count_of(need_size, self.page_size, full.sub_pool_name)
        tail = count if swa_tail_len is None else self._tail_pages(need_size, swa_tail_len)
        full._require_backed()
        swa._require_backed()
        if count > full._ids.available:
            return None
        extra = {full: count, swa: tail}
        if not make_room(self._chain, [extra[member] for member in self._chain]):
            return None
        virtual = full._take_new(count)
        swa._take_for(virtual[count - tail :])
        return torch.from_numpy(tokens_of(virtual, self.page_size))

    def free(self, free_index: Ids) -> None:
        """Free pages on both sides; see `MultiEndedAllocator.free`. Tombstones are not an error.

        Raises
        ------
        AllocatorError
            An id is out of range, was never allocated, or is free already, or
            its page is pinned. Nothing is freed then.
        """
        self._free_or_defer(self._reader.pages(free_index))

    def free_segment(self, free_index: Ids, *, start_pos: int) -> None:
        """`free` for a run of one request's tokens that starts at a page's first token."""
        self._free_or_defer(self._reader.segment_pages(free_index, start_pos))

    def free_swa(self, free_index: Ids) -> None:
        """Turn window pages into tombstones: a page as a whole, whichever of its tokens is named.

        What is a tombstone already, was never allocated, or is the sink has
        no window page and is passed over.

        Raises
        ------
        AllocatorError
            An id is out of range, or its window page is pinned. Nothing changes then.
        """
        self._free_swa(self._reader.pages(free_index))

    def free_swa_segment(self, free_index: Ids, *, start_pos: int) -> None:
        """`free_swa` for a run of one request's tokens that starts at a page's first token."""
        self._free_swa(self._reader.segment_pages(free_index, start_pos))

    def free_full(self, free_index: Ids) -> None:
        """Free the full side of pages whose window side is a tombstone.

        Raises
        ------
        AllocatorError
            As `free`; also when a page still has a window page, which nothing could free any more.
        """
        self._free_full(self._reader.pages(free_index))

    def free_full_segment(self, free_index: Ids, *, start_pos: int) -> None:
        """`free_full` for a run of one request's tokens that starts at a page's first token."""
        self._free_full(self._reader.segment_pages(free_index, start_pos))

    def clear(self) -> None:
        """Free everything; the tables keep their storage.

        Raises
        ------
        AllocatorError
            Pages are pinned.
        """
        # The full side's pages are pinned whenever the window's are, so the first call refuses for both.
        self.full_attn_allocator.clear()
        self.swa_attn_allocator.clear()
        self._drop_group()

    # Reading

    def translate_kv_loc(self, ids: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Virtual to physical token ids on the full side; see `MultiEndedAllocator.translate_kv_loc`."""
        return self.full_attn_allocator.translate_kv_loc(ids, out=out)

    def translate_loc_from_full_to_swa(
        self, ids: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same on the window side; tombstones become 0."""
        return self.swa_attn_allocator.translate_kv_loc(ids, out=out)

    def transfer_pages(self, ids: Ids, which: Literal["full", "swa"]) -> Pages:
        """Physical pages of tokens on one side, for a transfer: each page once, in the order of `ids`.

        Pin the ids first, so that the pages stay where they are.

        Raises
        ------
        AllocatorError
            There is no such side, or a page has none there: the sink must never travel.
        """
        if which not in ("full", "swa"):
            raise AllocatorError(f"There is no side {which!r}.", fix='Use "full" or "swa".')
        side = self.full_attn_allocator if which == "full" else self.swa_attn_allocator
        pages = self._reader.pages(ids)
        physical = side._tables.v2p[pages]
        missing = pages[physical <= 0]
        if len(missing):
            raise AllocatorError(
                f"{len(missing)} of {len(pages)} pages have no page on the {which} side, the first is "
                f"virtual page {missing[0]}.",
                fix="Transfer the tokens that are still in the window, and only allocated ones.",
            )
        return physical

    # Holding still

    def pin(self, ids: Ids) -> None:
        """Hold the pages of tokens in place on both sides, each once more.

        Raises
        ------
        AllocatorError
            A page is not allocated.
        """
        pages = self._reader.pages(ids)
        self.full_attn_allocator.pin(pages)
        self.swa_attn_allocator.pin(self._with_window(pages))

    def unpin(self, ids: Ids) -> None:
        """Hold the pages of tokens once less; what is still pinned keeps its window page until then.

        Raises
        ------
        AllocatorError
            A page is not pinned; no count changes then.
        """
        pages = self._reader.pages(ids)
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        on_full, on_swa = full._pinned(pages), swa._pinned(self._with_window(pages))
        full._pins.remove(on_full)
        swa._pins.remove(on_swa)

    def compact(self) -> int:
        """Pack both sides as tight as pins allow; returns how many pages were moved."""
        return sum(side.compact() for side in self._chain)

    def verify_byte_accounting(self) -> list[str]:
        """What does not add up, in words; see `MultiEndedAllocator.verify_byte_accounting`."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        found = [*full.verify_byte_accounting(), *swa.verify_byte_accounting()]
        orphans = (swa._tables.v2p > 0) & (full._tables.v2p <= 0)
        if orphans.any():
            found.append(f"{int(orphans.sum())} window pages belong to no allocated id")
        return found

    def _tail_pages(self, need_size: int, tail_len: int) -> int:
        tail = as_count(tail_len)
        if tail is None or not 0 <= tail <= need_size:
            raise AllocatorError(
                f"A window tail of {tail_len!r} of {need_size} tokens was asked for.",
                fix="Ask for 0 tokens up to all of them.",
            )
        return -(-tail // self.page_size)

    def _free_swa(self, pages: Pages) -> None:
        swa = self.swa_attn_allocator
        swa._release(swa._check_free(pages))

    def _free_full(self, pages: Pages) -> None:
        bound = self._with_window(pages)
        if len(bound):
            raise AllocatorError(
                f"{len(bound)} pages still have a window page, the first is virtual page {bound[0]}.",
                fix="Use free(), which frees both sides, or call free_swa() first.",
            )
        self._free_or_defer(pages)

    def _with_window(self, pages: Pages) -> Pages:
        return pages[self.swa_attn_allocator._tables.v2p[pages] > 0]

    def _generations(self) -> Pages:
        """See `FreeGroup`; the full side owns the ids."""
        return self.full_attn_allocator._generations()

    def _check_free(self, pages: Pages) -> Pages:
        """See `FreeGroup`; a pinned window page implies a pinned full page."""
        return self.full_attn_allocator._check_free(pages)

    def _release(self, pages: Pages) -> None:
        """See `FreeGroup`."""
        self.swa_attn_allocator._release(self._with_window(pages))
        self.full_attn_allocator._release(pages)
