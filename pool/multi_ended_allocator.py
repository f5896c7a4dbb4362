"""Pages of one sub-pool: virtual ids that stay, physical pages that may move."""

from __future__ import annotations

from typing import final

import torch
from kvarena.pool._free_group import FreeGroup
from kvarena.pool._free_pages import Pages
from kvarena.pool._ids import Ids, PageReader, count_of, tokens_of
from kvarena.pool._pool_member import PoolMember
from kvarena.pool._room import make_room
from kvarena.pool._translate import page_table, translate
from kvarena.pool.errors import AllocatorError
from kvarena.pool.unified_kv_pool import UnifiedKVPool

__all__ = ["MultiEndedAllocator"]


@final
class MultiEndedAllocator(FreeGroup, PoolMember):
    """Allocates whole pages of one sub-pool, from its end of the arena towards the others.

    Callers hold *virtual* token ids, which stay the same while compaction
    moves the *physical* pages behind them. Freed pages behind the frontier
    are reused first; when a neighbour needs their bytes, pages at the frontier
    are moved into them. Pinned pages neither move nor can they be freed.

    Bookkeeping is on the host and costs O(pages at hand). Ids that lie on the
    host are therefore taken and given (`alloc` returns CPU tensors); nothing
    here waits for the device, unless ids on the device are to be freed. Moves
    and table updates are ordered on the current stream: work that reads the
    pool must be ordered with it.

    Parameters
    ----------
    pool : UnifiedKVPool
        Where the pages lie.
    sub_pool_name : str
        Which sub-pool; it grows up or down.
    is_id_owner : bool
        Whether virtual ids are given out here; otherwise they come from
        another allocator, through `alloc_with_virtual`.
    num_virtual_pages : int, optional
        Virtual pages that the tables are made for: those of the allocator
        that owns the ids, at the largest size. Default: this sub-pool's own.

    Raises
    ------
    LayoutError
        There is no such sub-pool, or it is not an end of the arena.
    """

    def __init__(
        self,
        pool: UnifiedKVPool,
        sub_pool_name: str,
        *,
        is_id_owner: bool = True,
        num_virtual_pages: int | None = None,
    ) -> None:
        FreeGroup.__init__(self)
        PoolMember.__init__(
            self, pool, sub_pool_name, is_id_owner=is_id_owner, num_virtual_pages=num_virtual_pages
        )
        self._reader = PageReader(self._tables.virtual_to_physical.numel() - 1, self.page_size, sub_pool_name)

    @property
    def virtual_to_physical(self) -> torch.Tensor:
        """int64, one entry a virtual page and one behind the last; -1 where none is mapped."""
        return self._tables.virtual_to_physical

    @property
    def physical_to_virtual(self) -> torch.Tensor:
        """int64, one entry a physical page and one behind the last; -1 where none is mapped."""
        return self._tables.physical_to_virtual

    def is_slot_allocated(self, slot: int) -> bool:
        """Whether a virtual token id lies in a page that is in use; the sink is not."""
        page = int(slot) // self.page_size
        return 0 < page < len(self._tables.v2p) and bool(self._tables.v2p[page] > 0)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Virtual ids of `need_size` tokens, whole pages; None when they do not fit.

        Raises
        ------
        AllocatorError
            `need_size` is not a count of whole pages, this allocator owns no
            ids, or its pages have no memory yet.
        """
        count = count_of(need_size, self.page_size, self.sub_pool_name)
        if not self.is_id_owner:
            raise AllocatorError(
                f"{self.sub_pool_name!r} owns no virtual ids.", fix="Use alloc_with_virtual()."
            )
        self._require_backed()
        if count > self._ids.available or not self._make_room(count):
            return None
        return torch.from_numpy(tokens_of(self._take_new(count), self.page_size))

    def alloc_with_virtual(self, virtual_pages: Ids) -> bool:
        """Put pages behind virtual pages that another allocator gave out; False when they do not fit.

        Raises
        ------
        AllocatorError
            A page is out of range, the sink, named twice, or mapped already.
        """
        if self.is_id_owner:
            raise AllocatorError(f"{self.sub_pool_name!r} gives out its own ids.", fix="Use alloc().")
        named = self._reader.host(virtual_pages)
        pages = self._reader.distinct(named)
        if len(pages) != len(named):
            raise AllocatorError(f"{self.sub_pool_name!r}: a page is named twice, or is the sink.")
        mapped = pages[self._tables.v2p[pages] >= 0]
        if len(mapped):
            raise AllocatorError(f"{self.sub_pool_name!r}: virtual page {mapped[0]} has a page already.")
        self._require_backed()
        if not self._make_room(len(pages)):
            return False
        self._take_for(pages)
        if len(pages):
            self._id_bound = max(self._id_bound, int(pages.max()) + 1)
        return True

    def free(self, free_index: Ids) -> None:
        """Free every page that one of these tokens lies in; a page named twice is freed once.

        Ids in page 0, the sink, are padding and ask for nothing. An allocator
        that owns no ids skips pages that it has no page for.

        Raises
        ------
        AllocatorError
            An id is out of range, was never allocated, or is free already, or
            its page is pinned. Nothing is freed then.
        """
        self._free_or_defer(self._reader.pages(free_index))

    def free_segment(self, free_index: Ids, *, start_pos: int) -> None:
        """`free` for a run of one request's tokens that starts at a page's first token.

        Raises
        ------
        AllocatorError
            As `free`; also when the run is not made of whole pages in order
            (only the last may be partial).
        """
        self._free_or_defer(self._reader.segment_pages(free_index, start_pos))

    def clear(self) -> None:
        """Free everything, and forget an open group of frees; the tables keep their storage.

        Raises
        ------
        AllocatorError
            Pages are pinned.
        """
        PoolMember.clear(self)
        self._drop_group()

    def translate_kv_loc(self, ids: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Virtual to physical token ids, where `ids` lie; what has no page becomes 0, the sink.

        Shapes and devices are kept; int64. `out` is written in place, for
        captured graphs.

        Raises
        ------
        AllocatorError
            `ids` are not int32 or int64, or `out` is not an int64 tensor of
            their shape on their device; nothing is written.
        """
        return translate(self._tables.for_ids(ids), ids, self.page_size, out=out)

    def page_table(self, virtual_pages: torch.Tensor) -> torch.Tensor:
        """Virtual to physical pages, where they lie; what has no page becomes 0, the sink."""
        return page_table(self._tables.for_ids(virtual_pages), virtual_pages)

    def pin(self, virtual_pages: Ids) -> None:
        """Hold pages in place, each once more: they neither move nor can they be freed.

        Raises
        ------
        AllocatorError
            A page is not in use.
        """
        self._pins.add(self._physical(self._reader.distinct(self._reader.host(virtual_pages))))

    def unpin(self, virtual_pages: Ids) -> None:
        """Hold pages once less.

        Raises
        ------
        AllocatorError
            A page is not in use, or not pinned; no count changes then.
        """
        self._pins.remove(self._pinned(self._reader.distinct(self._reader.host(virtual_pages))))

    def _make_room(self, count: int) -> bool:
        chain = self._chain()
        return make_room(chain, [count if member is self else 0 for member in chain])

    def _take_new(self, count: int) -> Pages:
        virtual = self._ids.take(count)
        self._take_for(virtual)
        return virtual

    def _take_for(self, virtual: Pages) -> None:
        if len(virtual):
            self._tables.bind(virtual, self._span.take(len(virtual)))

    def _generations(self) -> Pages:
        """See `FreeGroup`."""
        return self._tables.generations

    def _check_free(self, pages: Pages) -> Pages:
        """Those of distinct pages that there is something to free of (see `FreeGroup`)."""
        physical = self._tables.v2p[pages]
        if not self.is_id_owner:
            pages, physical = pages[physical > 0], physical[physical > 0]
        elif len(physical) and physical.min() <= 0:
            bad = pages[physical <= 0]
            raise AllocatorError(
                f"{self.sub_pool_name!r}: {len(bad)} pages are not allocated, the first is virtual page "
                f"{bad[0]} (tokens {bad[0] * self.page_size} to {(bad[0] + 1) * self.page_size - 1}).",
                fix="They were freed before, or never allocated; free each page once.",
            )
        if self._pins.total and self._pins.counts[physical].any():
            bad = pages[self._pins.counts[physical] > 0]
            raise AllocatorError(
                f"{self.sub_pool_name!r}: {len(bad)} pages are pinned, the first is virtual page {bad[0]}.",
                fix="Wait for the transfer and unpin them first.",
            )
        return pages

    def _release(self, pages: Pages) -> None:
        """Free checked pages (see `FreeGroup`)."""
        if len(pages) == 0:
            return
        physical = self._tables.v2p[pages]
        self._tables.unbind(pages, physical)
        self._span.release(physical)
        if self.is_id_owner:
            self._ids.put_back(pages)
        self._retire(pages)

    def _physical(self, pages: Pages) -> Pages:
        physical = self._tables.v2p[pages]
        if len(physical) and physical.min() <= 0:
            raise AllocatorError(
                f"{self.sub_pool_name!r}: virtual page {pages[physical <= 0][0]} is not allocated."
            )
        return physical

    def _pinned(self, pages: Pages) -> Pages:
        physical = self._physical(pages)
        loose = pages[self._pins.counts[physical] == 0]
        if len(loose):
            raise AllocatorError(
                f"{self.sub_pool_name!r}: virtual page {loose[0]} is not pinned.",
                fix="Unpin once for each pin.",
            )
        return physical
