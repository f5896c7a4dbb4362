"""How allocators change their size, on any driver, as a pytest class: derive from it to test yours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kvarena.pool.errors import AllocatorError, PoolSizeError, PoolStateError
from kvarena.pool.multi_ended_allocator import MultiEndedAllocator
from kvarena.pool.sizing import PostCaptureKVResize, resize_for
from kvarena.pool.testing.allocator_samples import AllocatorFixtures, HybridSample, capacities, storage

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["ResizeContract"]


class ResizeContract(AllocatorFixtures):
    """Sizes after capture, against an eager pool of the same size; growing and shrinking."""

    @pytest.mark.parametrize("page_size", [1, 3, 4])
    @pytest.mark.parametrize("swapped", [False, True])
    def test_a_resized_pair_equals_an_eager_one(self, driver: Driver, page_size: int, swapped: bool) -> None:
        with HybridSample(driver, page_size=page_size, swapped=swapped, reserved=True) as sample:
            before = storage(sample)
            assert sample.allocator.available_size() == 0
            final = sample.reserved_bytes * 5 // 8 + 1
            sample.finalize(final)
            with HybridSample(
                driver, page_size=page_size, swapped=swapped, reserved=False, total=final
            ) as eager:
                assert capacities(sample) == capacities(eager)
                assert sample.allocator.available_size() > 0
            assert storage(sample) == before
            assert sample.allocator.verify_byte_accounting() == []

    def test_the_whole_capacity_can_be_allocated(self, driver: Driver) -> None:
        with HybridSample(driver, reserved=True) as sample:
            sample.finalize(sample.reserved_bytes // 2)
            allocator, page = sample.allocator, sample.page_size
            ids = allocator.alloc(allocator.available_size())
            assert ids is not None
            sample.write(ids)
            assert allocator.available_size() == 0
            assert allocator.alloc(page) is None
            assert allocator.verify_byte_accounting() == []
            sample.check(ids)
            allocator.free(ids)
            # Each side alone, the other one empty.
            maximum = allocator.alloc(allocator.size_full, swa_tail_len=0)
            assert maximum is not None
            left = allocator.swa_available_size() // page * sample.pool.page_bytes("swa")
            assert left < sample.pool.page_bytes("full")
            allocator.free(maximum)
            assert allocator.full_available_size() == allocator.size_full
            assert allocator.swa_available_size() == allocator.size_swa

    def test_nothing_is_given_out_that_has_no_memory(self, driver: Driver) -> None:
        with HybridSample(driver, reserved=True) as sample:
            with pytest.raises(AllocatorError, match="only the sink"):
                sample.allocator.alloc(sample.page_size)
            sample.pool.finalize_backing(resize_for(sample.pool, sample.reserved_bytes // 2))
            with pytest.raises(AllocatorError, match="resize"):
                sample.allocator.alloc(sample.page_size)
            assert sample.allocator.verify_byte_accounting() == []

    def test_a_resize_that_cannot_be_changes_nothing(self, driver: Driver) -> None:
        with HybridSample(driver, reserved=True) as sample:
            pool, allocator = sample.pool, sample.allocator
            half = resize_for(pool, sample.reserved_bytes // 2)
            before = capacities(sample)
            with pytest.raises(PoolStateError, match="finalize_backing"):
                allocator.resize(half)
            assert capacities(sample) == before
            pool.finalize_backing(half)
            before = capacities(sample)
            for nbytes in (None, sample.reserved_bytes, True):
                with pytest.raises(PoolSizeError) as refused:
                    allocator.resize(
                        PostCaptureKVResize(max_total_num_tokens=1, unified_memory_pool_bytes=nbytes)
                    )
                assert refused.value.minimum == pool.total_bytes
                assert capacities(sample) == before
            allocator.resize(half)
            ids = allocator.alloc(4 * sample.page_size)
            assert ids is not None
            sample.write(ids)
            before = capacities(sample)
            with pytest.raises(AllocatorError, match=str(4 * sample.page_size)):
                allocator.resize(half)
            with pytest.raises(AllocatorError, match="allocated"):
                allocator.revert_resize()
            assert capacities(sample) == before
            sample.check(ids)
        with HybridSample(driver, reserved=False) as eager:
            before = capacities(eager)
            with pytest.raises(PoolStateError, match="eager"):
                eager.allocator.resize(resize_for(eager.pool, eager.pool.total_bytes))
            with pytest.raises(PoolStateError, match="eager"):
                eager.allocator.revert_resize()
            with pytest.raises(PoolStateError):
                eager.allocator.shrink(eager.pool.floor_bytes)
            assert capacities(eager) == before

    def test_a_resize_can_be_taken_back(self, driver: Driver) -> None:
        with HybridSample(driver, reserved=True) as sample:
            before = capacities(sample)
            sample.finalize(sample.reserved_bytes // 2)
            sample.allocator.revert_resize()
            sample.pool.revert_finalize()
            assert capacities(sample) == before
            sample.finalize(sample.reserved_bytes)
            assert sample.allocator.available_size() > 0

    def test_window_tables_cover_every_id_of_the_full_side(self, driver: Driver) -> None:
        """sgl-project/sglang#37560: sized by its own pages, the window's table was read out of bounds."""
        with HybridSample(driver, reserved=False, wide_window=True) as sample:
            full, swa = sample.allocator.full, sample.allocator.swa
            assert full.num_pages > swa.num_pages
            assert swa.virtual_to_physical.numel() == full.virtual_to_physical.numel()
            ids = sample.allocator.alloc(sample.allocator.size_full, swa_tail_len=0)
            assert ids is not None
            on_window = sample.allocator.translate_loc_from_full_to_swa(ids.to(sample.pool.device))
            assert not on_window.any()

    @pytest.mark.parametrize("name", ["full", "swa"])
    def test_set_capacity_keeps_the_tables(self, driver: Driver, name: str) -> None:
        with HybridSample(driver, reserved=False) as sample:
            allocator = MultiEndedAllocator(sample.pool, name)
            where = allocator.virtual_to_physical.data_ptr(), allocator.physical_to_virtual.data_ptr()
            maximum = allocator.max_slots
            allocator._set_capacity(maximum // 2)
            pages = maximum // 2 // sample.page_size
            assert (allocator.num_pages, allocator.max_slots) == (pages, pages * sample.page_size)
            assert allocator.size == allocator.max_slots
            ids = allocator.alloc(allocator.available_size())
            assert ids is not None
            assert len(ids) == (pages - allocator.min_page_index) * sample.page_size
            physical = allocator.translate_kv_loc(ids.to(sample.pool.device)).cpu()
            assert physical.max() < allocator.max_slots
            assert physical.min() >= allocator.min_slot_index
            with pytest.raises(AllocatorError, match="tokens are allocated"):
                allocator._set_capacity(maximum)
            allocator.free(ids)
            with pytest.raises(AllocatorError, match="tables"):
                allocator._set_capacity(maximum + sample.page_size)
            allocator._set_capacity(maximum)
            assert allocator.max_slots == maximum
            assert where == (
                allocator.virtual_to_physical.data_ptr(),
                allocator.physical_to_virtual.data_ptr(),
            )
            assert allocator.verify_byte_accounting() == []

    def test_growing_and_shrinking_with_pages_in_use(self, driver: Driver) -> None:
        with HybridSample(driver, reserved=True) as sample:
            pool, allocator = sample.pool, sample.allocator
            half = sample.reserved_bytes // 2
            sample.finalize(half)
            ids = allocator.alloc(allocator.available_size() // 2 // sample.page_size * sample.page_size)
            assert ids is not None
            sample.write(ids)
            window = allocator.swa_available_size()
            pool.grow(sample.reserved_bytes)
            assert allocator.swa_available_size() == window
            allocator.grow()
            assert allocator.swa_available_size() > window
            more = allocator.alloc(allocator.available_size() // 4 // sample.page_size * sample.page_size)
            assert more is not None
            sample.write(more)
            sample.check(ids)
            top = allocator.transfer_pages(more, "swa")
            assert top.max() >= half // pool.page_bytes("swa")  # new pages were used
            allocator.pin(more[:1])
            before = capacities(sample)
            with pytest.raises(AllocatorError, match="1 pages at or above"):
                allocator.shrink(half)
            assert capacities(sample) == before
            allocator.unpin(more[:1])
            assert allocator.shrink(half) > 0
            pool.shrink(half)
            assert self._sizes(capacities(sample)) == self._sizes_when_eager(driver, half)
            assert allocator.verify_byte_accounting() == []
            sample.check(ids)
            sample.check(more)
            assert allocator.shrink(half) == 0  # it has that size
            with pytest.raises(PoolSizeError, match="cannot shrink"):
                allocator.shrink(half + 1)
            too_small = pool.floor_bytes
            with pytest.raises(PoolSizeError) as refused:
                allocator.shrink(too_small)
            assert too_small < refused.value.minimum <= half
            sample.check(ids)
            allocator.free(torch.cat([ids, more]))
            assert allocator.full_available_size() == allocator.size_full

    @staticmethod
    def _sizes(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if "available" not in key}

    def _sizes_when_eager(self, driver: Driver, total: int) -> dict[str, Any]:
        with HybridSample(driver, reserved=False, total=total) as eager:
            return self._sizes(capacities(eager))
