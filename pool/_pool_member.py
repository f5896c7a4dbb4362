"""One sub-pool's pages and bounds, and its place in the chain of its arena."""

from __future__ import annotations

import numpy as np
from kvarena.pool._compaction import PageMover
from kvarena.pool._free_pages import Pages, PageSpan
from kvarena.pool._page_tables import PageTables
from kvarena.pool._pins import PinCounts
from kvarena.pool._room import Extent, fits
from kvarena.pool._virtual_ids import VirtualIds
from kvarena.pool.errors import AllocatorError, LayoutError
from kvarena.pool.unified_kv_pool import UnifiedKVPool

__all__ = ["PoolMember"]


class PoolMember:
    """What `MultiEndedAllocator` stands on: a `_room.Member` that is one end of the arena.

    Parameters
    ----------
    pool : UnifiedKVPool
        Where the pages lie.
    sub_pool_name : str
        Which sub-pool; it grows up or down.
    is_id_owner : bool
        Whether virtual ids are given out here.
    num_virtual_pages : int, optional
        Virtual pages that the tables are made for. Default: this sub-pool's own.

    Raises
    ------
    LayoutError
        There is no such sub-pool, or it is not an end of the arena.
    """

    def __init__(
        self, pool: UnifiedKVPool, sub_pool_name: str, *, is_id_owner: bool, num_virtual_pages: int | None
    ) -> None:
        spec = pool.spec(sub_pool_name)
        if spec.grow_direction not in ("up", "down"):
            raise LayoutError(
                f"Sub-pool {sub_pool_name!r} with grow_direction {spec.grow_direction!r} is not an end.",
                fix='Give it "up" or "down".',
            )
        self.pool = pool
        self.sub_pool_name = sub_pool_name
        self.is_id_owner = is_id_owner
        self.grow_direction = spec.grow_direction
        self.grows_up = spec.grow_direction == "up"
        self.page_size = pool.slots_per_page(sub_pool_name)
        self.page_bytes = pool.page_bytes(sub_pool_name)
        self.entry_bytes = spec.entry_bytes()
        self.min_page_index = pool.min_page_index(sub_pool_name)
        self.min_slot_index = pool.min_slot_index(sub_pool_name)
        self.low_peer: PoolMember | None = None
        self.high_peer: PoolMember | None = None
        table_pages = pool.reserved_num_pages(sub_pool_name)
        id_pages = table_pages if num_virtual_pages is None else num_virtual_pages
        self._tables = PageTables(id_pages, table_pages, pool.device)
        self._span = PageSpan(table_pages, grows_up=self.grows_up)
        self._pins = PinCounts(table_pages)
        self._ids = VirtualIds(id_pages if is_id_owner else 0, first=self.min_page_index)
        self._mover = PageMover(pool, sub_pool_name)
        self.num_pages = self._id_limit = self._id_bound = 0
        self._id_source: PoolMember | None = None
        self._set_capacity(pool.max_slots(sub_pool_name), virtual_num_pages=num_virtual_pages)

    @property
    def num_virtual_ids(self) -> int:
        """The bound of virtual pages: all that are given out, or can be, are below it.

        After a shrink that is more than the pool has pages for, as long as ids
        given out before lie above them; it falls when they are freed.
        """
        return (self._id_source or self)._id_bound

    @property
    def max_slots(self) -> int:
        """The bound of token ids, the sink's among them: virtual ones (`num_virtual_ids`) and physical ones.

        Whatever is indexed by ids needs as many entries, after each grow and
        shrink as well.
        """
        return max(self.num_pages, self.num_virtual_ids) * self.page_size

    @property
    def size(self) -> int:
        """Physical slots, the sink's among them."""
        return self.num_pages * self.page_size

    @property
    def moved_pages(self) -> int:
        """Pages that were moved so far, to make room or to shrink."""
        return self._mover.moved_pages

    def available_size(self) -> int:
        """Tokens that can be taken now, what compaction frees included; 0 before the pool is final. O(1)."""
        return self._available_pages() * self.page_size

    def allocated_count(self) -> int:
        """Tokens in pages that are in use."""
        return self._span.live * self.page_size

    def bind_peer(self, other: PoolMember) -> None:
        """Make the other end of the arena this one's neighbour, and this one its.

        Raises
        ------
        AllocatorError
            They are not the two ends of one pool.
        """
        if other.pool is not self.pool or other.grows_up == self.grows_up:
            raise AllocatorError(
                f"{self.sub_pool_name!r} and {other.sub_pool_name!r} are not the two ends of one pool.",
                fix="Bind the allocator that grows up to the one that grows down.",
            )
        low, high = (self, other) if self.grows_up else (other, self)
        low.high_peer, high.low_peer = high, low

    def compact(self) -> int:
        """Move pages until the frontier is as far back as pins allow; returns how many were moved."""
        extent = self.extent(0, packed=True)
        if extent is None:
            return 0
        return self.retract_to((extent.high if self.grows_up else extent.low) // self.page_bytes)

    def clear(self) -> None:
        """Free everything; the tables keep their storage.

        Raises
        ------
        AllocatorError
            Pages are pinned.
        """
        if self._pins.total:
            raise AllocatorError(
                f"{self.sub_pool_name!r} cannot be cleared: pages are pinned {self._pins.total} times.",
                fix="Wait for the transfers and unpin their pages first.",
            )
        self._tables.clear()
        self._span.reset(self.min_page_index, self.num_pages)
        self._ids.reset(self._id_limit)
        self._id_bound = self._id_limit

    def verify_byte_accounting(self) -> list[str]:
        """What does not add up, in words; empty when all is well.

        Looks at every page and waits for the device: for tests and idle checks.
        """
        found = self._span.violations() + self._tables.violations()
        used = np.flatnonzero(self._span.used)
        mapped = np.flatnonzero(self._tables.p2v[:-1] >= 0)
        if not np.array_equal(used, mapped[mapped > 0]):
            found.append("the pages in use are not those that physical_to_virtual maps")
        if np.any(self._span.used[np.flatnonzero(self._pins.counts)] == 0):
            found.append("a pinned page is not in use")
        if self.is_id_owner:
            found += self._ids.violations(self._tables.v2p)
        if np.any(self._tables.v2p[self.num_virtual_ids :] >= 0):
            found.append(f"virtual pages at or above the bound, {self.num_virtual_ids}, are mapped")
        if self._span.live and not self._is_backed():
            found.append(f"{self._span.live} pages are in use, and not all its pages have memory")
        chain = self._chain()
        if not fits(chain, [0] * len(chain), packed=False):
            found.append("spans of the chain overlap")
        return [f"{self.sub_pool_name!r}: {what}" for what in found]

    def extent(self, extra: int, *, packed: bool) -> Extent | None:
        """See `_room.Member.extent`."""
        span, nbytes = self._span, self.page_bytes
        live = span.live + extra
        if live == 0:
            return None
        fresh = max(0, extra - span.holes)
        if self.grows_up:
            high = max(span.floor + live, self._pins.high) if packed else span.high + fresh
            return Extent(span.floor * nbytes, high * nbytes)
        low = min(span.ceiling - live, self._pins.low) if packed else span.low - fresh
        return Extent(low * nbytes, span.ceiling * nbytes)

    def within_bounds(self, extra: int) -> bool:
        """See `_room.Member.within_bounds`."""
        return self._span.live + extra <= self._span.ceiling - self._span.floor

    def retract_to(self, edge: int) -> int:
        """See `_room.Member.retract_to`; `edge` is no tighter than pins and pages in use allow."""
        span = self._span
        low, high = (edge, span.high) if self.grows_up else (span.low, edge)
        if low >= high:
            return 0
        source = span.used_between(low, high)
        target = span.find_holes(len(source))
        span.mark(target)
        self._move(source, target)
        span.release(source)
        return len(source)

    def _extent_after(self, ceiling: int) -> Extent | None:
        """What a span that grows down covers once pages at or above `ceiling` have moved below it."""
        span = self._span
        if span.live == 0:
            return None
        outside = len(span.used_between(ceiling, span.high))
        low = min(span.low, ceiling)
        holes = ceiling - low - (span.live - outside)
        return Extent((low - max(0, outside - holes)) * self.page_bytes, ceiling * self.page_bytes)

    def _set_capacity(self, max_slots: int, *, virtual_num_pages: int | None = None) -> None:
        """Use the pages of `max_slots` slots from now on; the tables keep their storage.

        Raises
        ------
        AllocatorError
            Pages are in use, or the tables are too small.
        """
        pages = int(max_slots) // self.page_size
        ids = pages if virtual_num_pages is None else int(virtual_num_pages)
        if self._span.live:
            raise AllocatorError(
                f"{self.sub_pool_name!r} cannot change its capacity: {self.allocated_count()} tokens are "
                "allocated.",
                fix="Free them, or clear() the allocator, first.",
            )
        if not self.min_page_index <= pages < len(self._tables.p2v) or not 0 <= ids < len(self._tables.v2p):
            raise AllocatorError(
                f"{self.sub_pool_name!r} has tables for {len(self._tables.p2v) - 1} pages and "
                f"{len(self._tables.v2p) - 1} virtual ones, and the sink takes {self.min_page_index}: "
                f"it cannot have {pages} and {ids}.",
                fix="Reserve more before capture, or finalize to at least the floor for one request.",
            )
        self.num_pages, self._id_limit = pages, ids
        self.clear()

    def _change_bounds(self, num_pages: int, virtual_num_pages: int) -> None:
        """Change the capacity under pages that are in use, moving those at or above `num_pages` down.

        A span that grows up has none there; the bytes that others need are free already.
        """
        moves = self._span.set_ceiling(num_pages)
        if moves is not None:
            self._move(*moves)
        self.num_pages, self._id_limit = num_pages, virtual_num_pages
        self._id_bound = self._highest_id(len(self._tables.v2p))
        if self.is_id_owner:
            self._ids.set_limit(virtual_num_pages, self._tables.v2p)

    def _retire(self, pages: Pages) -> None:
        """Lower the bound of ids, if the highest above the limit is among the freed `pages`."""
        if self._id_bound > self._id_limit and int(pages.max()) == self._id_bound - 1:
            self._id_bound = self._highest_id(self._id_bound)

    def _highest_id(self, end: int) -> int:
        """One past the highest virtual page below `end` that is out, or the limit if that is more."""
        out = np.flatnonzero(self._tables.v2p[self._id_limit : end] >= 0)
        return self._id_limit + (int(out[-1]) + 1 if len(out) else 0)

    def _move(self, source: Pages, target: Pages) -> None:
        if len(source):
            self._mover.move(source, target)
            self._tables.rebind(self._tables.p2v[source], source, target)

    def _available_pages(self) -> int:
        if not self._is_backed():
            return 0
        span = self._span
        low, high = span.floor, span.ceiling
        # Only the frontier's side is shared. Pins in the span take no room: the holes behind them are used.
        if self.grows_up:
            above = self._neighbour(self.high_peer)
            if above is not None:
                high = min(high, above.low // self.page_bytes)
        else:
            below = self._neighbour(self.low_peer)
            if below is not None:
                low = max(low, -(-below.high // self.page_bytes))
        room = max(0, high - low - span.live)
        return min(room, self._ids.available) if self.is_id_owner else room

    def _neighbour(self, member: PoolMember | None) -> Extent | None:
        """The packed extent of the nearest member that has one, from `member` on."""
        while member is not None:
            extent = member.extent(0, packed=True)
            if extent is not None:
                return extent
            member = member.high_peer if self.grows_up else member.low_peer
        return None

    def _chain(self) -> list[PoolMember]:
        member: PoolMember = self
        while member.low_peer is not None:
            member = member.low_peer
        chain = [member]
        while member.high_peer is not None:
            member = member.high_peer
            chain.append(member)
        return chain

    def _is_backed(self) -> bool:
        return self.pool.finalized and self.num_pages * self.page_bytes <= self.pool.total_bytes

    def _require_backed(self) -> None:
        if self._is_backed():
            return
        if not self.pool.finalized:
            raise AllocatorError(
                f"{self.sub_pool_name!r}: only the sink of the pool has memory.",
                fix="Call pool.finalize_backing() and then the allocator's resize() first.",
            )
        raise AllocatorError(
            f"{self.sub_pool_name!r} knows {self.num_pages} pages, the pool has memory for "
            f"{self.pool.num_pages(self.sub_pool_name)}.",
            fix="Call resize() after finalize, and the allocator's shrink() before the pool's.",
        )
