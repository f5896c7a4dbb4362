"""What allocators tell of their ids must hold, on any driver: a pytest class to derive from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from kvarena.pool.errors import AllocatorError
from kvarena.pool.testing.allocator_samples import AllocatorFixtures, HybridSample, allocated, capacities

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["AllocatorIdsContract"]


class AllocatorIdsContract(AllocatorFixtures):
    """Bounds of ids, who may free one, where their translation goes, and how many there are to have."""

    @pytest.mark.parametrize("wide_window", [False, True])
    @pytest.mark.parametrize("swapped", [False, True])
    def test_every_bound_holds_for_every_id_that_is_out(
        self, driver: Driver, swapped: bool, wide_window: bool
    ) -> None:
        """sgl-project/sglang#17630: after a shrink `max_slots` said 612 while id 1023 was in use."""
        with HybridSample(driver, reserved=True, swapped=swapped, wide_window=wide_window) as sample:
            pool, allocator, page = sample.pool, sample.allocator, sample.page_size
            half = sample.reserved_bytes // 2
            sample.finalize(half)
            pool.grow(sample.reserved_bytes)
            allocator.grow()
            low = allocated(allocator, 2 * page)
            rest = allocator.alloc(allocator.full_available_size(), swa_tail_len=0)
            assert rest is not None
            kept = torch.cat([low, rest[-page:]])  # the lowest ids, and the highest
            allocator.free(rest[:-page])
            allocator.shrink(half)
            pool.shrink(half)
            highest = int(kept.max())
            assert highest >= allocator.size_full + page * allocator.full.min_page_index
            for side in (allocator.full, allocator.swa):
                assert allocator.max_slots > highest
                assert side.max_slots > highest
                assert side.num_virtual_ids * page > highest
                assert side.size == pool.max_slots(side.sub_pool_name) <= side.max_slots
                assert int(side.translate_kv_loc(kept).max()) < side.size
            assert allocator.verify_byte_accounting() == []
            # The window page goes first: the id stays out, and so does the bound.
            allocator.free_swa(kept)
            assert allocator.swa.max_slots > highest
            more = allocated(allocator, allocator.available_size())
            assert int(more.max()) < min(allocator.max_slots, allocator.full.size)
            allocator.free(more)
            allocator.free(kept[-page:])
            assert allocator.max_slots == allocator.full.size == pool.max_slots("full")
            assert allocator.full.num_virtual_ids == allocator.swa.num_virtual_ids == pool.num_pages("full")
            allocator.free(kept[:-page])
            assert allocator.full_available_size() == allocator.size_full

    def test_a_page_given_out_again_is_not_freed_by_a_group(self, sample: HybridSample) -> None:
        """It was freed a second time when the group ended, though another request had it by then."""
        allocator, page = sample.allocator, sample.page_size
        mine, other = allocated(allocator, 4 * page), allocated(allocator, page)
        allocator.free_group_begin()
        allocator.free(mine)
        allocator.free(other)
        allocator.free_swa(mine[:page])
        allocator.full.free(mine[:page])  # behind the group's back
        again = allocated(allocator, page)
        assert torch.equal(again, mine[:page])
        sample.write(again)
        before = capacities(sample)
        with pytest.raises(AllocatorError, match=r"1 pages of the group were freed outside.*virtual page"):
            allocator.free_group_end()
        assert capacities(sample) == before
        assert allocator.is_slot_allocated(int(again[0]))
        sample.check(again)
        allocator.free_group_end()  # the others'
        assert allocator.full.allocated_count() == page
        sample.check(again)
        allocator.free(again)
        assert allocator.verify_byte_accounting() == []

    def test_a_page_freed_twice_in_a_group_of_one_side_is_refused(self, sample: HybridSample) -> None:
        full, page = sample.allocator.full, sample.page_size
        ids = full.alloc(2 * page)
        assert ids is not None
        full.free_group_begin()
        full.free(ids)
        full.clear()
        assert full.alloc(2 * page) is not None
        full.free_group_begin()
        full.free(ids[:page])
        full.free(ids[:page])  # twice in one group is once
        full.free_group_end()
        assert full.allocated_count() == page

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            ((5,), torch.int64),
            ((8, 1), torch.int64),
            ((2, 4), torch.int64),
            ((), torch.int64),
            ((8,), torch.int32),
            ((8,), torch.int16),
            ((8,), torch.uint8),
            ((8,), torch.float64),
            ((8,), torch.float32),
            ((8,), torch.bool),
        ],
        ids=str,
    )
    def test_translation_is_not_broadcast_or_truncated(
        self, sample: HybridSample, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """One id filled an `out` of five, and int16 made 7 of 65 543."""
        allocator, device = sample.allocator, sample.pool.device
        ids = allocated(allocator, 8).to(device)
        out = torch.full(shape, 1, dtype=dtype, device=device)
        for ids_now in (ids, ids[:1]):
            for translate in (
                allocator.translate_kv_loc,
                allocator.translate_loc_from_full_to_swa,
                allocator.full.translate_kv_loc,
            ):
                with pytest.raises(AllocatorError, match="cannot be translated into"):
                    translate(ids_now, out=out)
                assert bool((out == 1).all())
        right = torch.zeros(8, dtype=torch.int64, device=device)
        assert allocator.translate_kv_loc(ids.to(torch.int32), out=right) is right
        assert torch.equal(right, allocator.translate_kv_loc(ids))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.uint8])
    def test_only_integers_wide_enough_are_translated(self, sample: HybridSample, dtype: torch.dtype) -> None:
        ids = torch.ones(3, device=sample.pool.device).to(dtype)
        for read in (sample.allocator.translate_kv_loc, sample.allocator.full.page_table):
            with pytest.raises(AllocatorError, match=str(dtype)):
                read(ids)

    @pytest.mark.parametrize("swapped", [False, True])
    @pytest.mark.parametrize("pinned", [False, True])
    def test_what_is_told_available_can_be_had_and_no_page_more(
        self, driver: Driver, swapped: bool, pinned: bool
    ) -> None:
        """Bytes that the neighbour has borrowed are no one else's: asked for until it says no."""
        with HybridSample(driver, page_size=4, reserved=False, swapped=swapped) as sample:
            allocator, page = sample.allocator, sample.page_size
            full, swa = allocator.full, allocator.swa
            for share in (0, 1, 3):
                allocator.clear()
                held = allocated(allocator, allocator.available_size() * share // 4 // page * page)
                tombs = allocator.alloc(allocator.full_available_size() // 2 // page * page, swa_tail_len=0)
                assert tombs is not None
                allocator.free(held.view(-1, page)[::2].reshape(-1))  # holes on both sides
                pins = held.view(-1, page)[1::2][-1:].reshape(-1) if pinned else held[:0]
                allocator.pin(pins)
                # The window side alone, behind ids that have no window page.
                told = swa.available_size() // page
                some = min(told, len(tombs) // page)
                virtual = tombs[::page] // page
                assert swa.alloc_with_virtual(virtual[:some])
                if some == told:
                    assert swa.available_size() == 0
                    assert not swa.alloc_with_virtual(virtual[some : some + 1]) or len(virtual) == some
                allocator.free_swa(tombs)
                # Both sides together.
                told = allocator.available_size()
                assert allocator.alloc(told + page) is None
                both = allocated(allocator, told)
                assert allocator.available_size() == 0
                allocator.free(both)
                # The full side alone.
                told = full.available_size()
                assert told == allocator.full_available_size()
                assert allocator.alloc(told + page, swa_tail_len=0) is None
                alone = allocator.alloc(told, swa_tail_len=0)
                assert alone is not None
                assert full.available_size() == 0
                allocator.unpin(pins)
                assert allocator.verify_byte_accounting() == []
