"""What the allocators must do on any driver, as a pytest class: derive from it to test yours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kvarena.pool.errors import AllocatorError
from kvarena.pool.testing.allocator_samples import AllocatorFixtures, HybridSample, allocated, capacities

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["AllocatorContract"]


class AllocatorContract(AllocatorFixtures):
    """Giving out, taking back, moving and holding still."""

    def test_a_window_page_is_cleared_as_one(self, sample: HybridSample) -> None:
        """sgl-project/sglang#27779: freeing one token cleared only its mapping, and its page came twice."""
        allocator = sample.allocator
        ids = allocated(allocator, 8)
        size, live = allocator.size_swa, allocator.swa.allocated_count
        allocator.free_swa(ids[1:2])
        assert (live(), allocator.swa_available_size() + live()) == (4, size)
        assert not allocator.translate_loc_from_full_to_swa(ids[:4].to(sample.pool.device)).any()
        allocator.free_swa(ids[[0, 2, 3]])
        assert (live(), allocator.swa_available_size() + live()) == (4, size)
        assert allocator.verify_byte_accounting() == []
        allocator.free(ids)
        assert (live(), allocator.swa_available_size()) == (0, size)
        assert allocator.verify_byte_accounting() == []

    def test_pages_come_behind_ids_that_another_allocator_gave_out(self, sample: HybridSample) -> None:
        allocator, window, full = sample.allocator, sample.allocator.swa, sample.allocator.full
        ids = allocated(allocator, 16)
        virtual = ids[:: sample.page_size] // sample.page_size
        with pytest.raises(AllocatorError, match="has a page already"):
            window.alloc_with_virtual(virtual)
        with pytest.raises(AllocatorError, match="its own ids"):
            full.alloc_with_virtual(virtual)
        allocator.free_swa(ids)
        before = window.available_size()
        for bad in (virtual[[0, 0]], torch.tensor([0]), torch.tensor([1 << 40])):
            with pytest.raises(AllocatorError):
                window.alloc_with_virtual(bad)
        assert (window.allocated_count(), window.available_size()) == (0, before)
        assert window.alloc_with_virtual(virtual)
        assert (window.allocated_count(), window.available_size()) == (16, before - 16)
        pages = allocator.transfer_pages(ids, "swa").tolist()
        assert len(set(pages)) == len(pages) == 4
        assert min(pages) >= sample.pool.min_page_index("swa")
        assert allocator.verify_byte_accounting() == []
        allocator.free(ids)
        everything = full.alloc(full.available_size())
        assert everything is not None
        assert not window.alloc_with_virtual(everything[:: sample.page_size] // sample.page_size)
        assert window.allocated_count() == 0
        full.free(everything)
        assert allocator.verify_byte_accounting() == []

    @pytest.mark.parametrize(
        "path", ["free", "free_segment", "group", "group of segments", "free_swa", "free_swa_segment"]
    )
    def test_the_sink_never_enters_a_free_list(self, sample: HybridSample, path: str) -> None:
        """sgl-project/sglang#38519: tombstones of a freed segment handed the sentinel back, several times."""
        allocator = sample.allocator
        ids = allocated(allocator, 64)
        allocator.free_swa(ids[:32])
        padded = torch.cat([ids, torch.zeros(8, dtype=torch.int64)])
        if path == "free":
            allocator.free(padded)
        elif path == "free_segment":
            allocator.free_segment(padded, start_pos=0)
        elif path == "group":
            allocator.free_group_begin()
            for part in torch.chunk(padded, 7):
                allocator.free(part)
            allocator.free_group_end()
        elif path == "group of segments":
            allocator.free_group_begin()
            allocator.free_full_segment(ids[:32], start_pos=4)
            allocator.free_segment(padded[32:], start_pos=36)
            allocator.free_group_end()
        elif path == "free_swa":
            allocator.free_swa(padded)
        else:
            allocator.free_swa_segment(padded, start_pos=0)
        assert allocator.swa.allocated_count() == 0
        assert allocator.swa_available_size() <= allocator.size_swa
        assert allocator.verify_byte_accounting() == []
        maximum = allocator.alloc(allocator.available_size())
        assert maximum is not None
        assert maximum.min() >= sample.page_size
        for side in ("full", "swa"):
            pages = allocator.transfer_pages(maximum, side)
            assert len(set(pages.tolist())) == len(maximum) // sample.page_size
            assert pages.min() >= sample.pool.min_page_index(side)

    @pytest.mark.parametrize(
        ("bad", "match"),
        [
            (torch.tensor([1 << 40]), "outside"),
            (torch.tensor([-1]), "outside"),
            (torch.tensor([5.0]), "float32"),
            (torch.tensor([True]), "bool"),
            (["4"], "type"),
        ],
        ids=["beyond the tables", "negative", "float", "bool", "text"],
    )
    def test_ids_of_a_wrong_type_or_range_are_refused(
        self, sample: HybridSample, bad: Any, match: str
    ) -> None:
        allocator = sample.allocator
        ids = allocated(allocator, 16)
        before = capacities(sample)
        for call in (allocator.free, allocator.free_swa, allocator.free_full, allocator.pin, allocator.unpin):
            with pytest.raises(AllocatorError, match=match):
                call(bad)
        if isinstance(bad, torch.Tensor) and bad.dtype == torch.int64:
            with pytest.raises(AllocatorError, match=match):
                allocator.free(torch.cat([ids, bad]))
        assert capacities(sample) == before
        assert allocator.verify_byte_accounting() == []

    def test_a_double_free_changes_nothing(self, sample: HybridSample) -> None:
        allocator = sample.allocator
        ids = allocated(allocator, 16)
        allocator.free(ids[:4])
        before = capacities(sample)
        never = torch.tensor([allocator.max_slots - 1])
        for wrong in (ids, ids[:1], never):
            with pytest.raises(AllocatorError, match="not allocated"):
                allocator.free(wrong)
            with pytest.raises(AllocatorError, match="not allocated"):
                allocator.pin(wrong)
            assert capacities(sample) == before
        with pytest.raises(AllocatorError, match="still have a window page"):
            allocator.free_full(ids[4:])
        with pytest.raises(AllocatorError, match="first of a page"):
            allocator.free_segment(ids[4:], start_pos=2)
        with pytest.raises(AllocatorError, match="run of whole pages"):
            allocator.free_segment(ids[5:], start_pos=4)
        for size in (-4, 3, True, 4.0):
            with pytest.raises(AllocatorError):
                allocator.alloc(size)  # type: ignore[arg-type]
        assert capacities(sample) == before
        allocator.free(ids[[4, 9, 15, 15, 4]])  # a page for each, named by any of its tokens
        assert allocator.full.allocated_count() == 0
        assert allocator.verify_byte_accounting() == []

    def test_a_group_takes_effect_at_its_end(self, sample: HybridSample) -> None:
        allocator = sample.allocator
        ids = allocated(allocator, 16)
        with pytest.raises(AllocatorError, match="No group"):
            allocator.free_group_end()
        allocator.free_group_begin()
        with pytest.raises(AllocatorError, match="open already"):
            allocator.free_group_begin()
        allocator.free(ids[:2])
        allocator.free(ids[2:8])
        assert allocator.full.allocated_count() == 16
        allocator.pin(ids[4:5])
        with pytest.raises(AllocatorError, match="pinned"):
            allocator.free_group_end()
        assert allocator.full.allocated_count() == 16
        allocator.unpin(ids[4:5])
        allocator.free_group_end()
        assert allocator.full.allocated_count() == allocator.swa.allocated_count() == 8
        assert allocator.verify_byte_accounting() == []

    def test_one_side_makes_room_for_the_other(self, sample: HybridSample) -> None:
        allocator, page = sample.allocator, sample.page_size
        ids = allocated(allocator, allocator.available_size())
        sample.write(ids)
        pages = ids.view(-1, page)
        freed, kept = pages[::2].reshape(-1), pages[1::2].reshape(-1)
        allocator.free(freed)
        extra = allocated(allocator, allocator.available_size())  # holes on both sides
        sample.write(extra)
        sample.check(kept)
        allocator.free(extra)
        # Only the full side now: it needs bytes that the window's pages are spread over.
        more = allocator.alloc(allocator.full_available_size(), swa_tail_len=0)
        assert more is not None
        assert allocator.swa.moved_pages > 0
        assert allocator.full_available_size() == 0
        sample.check(kept)
        assert allocator.verify_byte_accounting() == []

    def test_pinned_pages_stay_and_cannot_be_freed(self, sample: HybridSample) -> None:
        allocator, page = sample.allocator, sample.page_size
        ids = allocated(allocator, 16 * page)
        sample.write(ids)
        kept = ids[-page:]
        allocator.free(ids[: 8 * page])
        allocator.pin(kept)
        allocator.pin(kept)
        where = [allocator.transfer_pages(kept, side).tolist() for side in ("full", "swa")]
        available = allocator.available_size()
        allocator.compact()
        assert allocator.available_size() == available
        assert where == [allocator.transfer_pages(kept, side).tolist() for side in ("full", "swa")]
        before = capacities(sample)
        for call in (allocator.free, allocator.free_swa):
            with pytest.raises(AllocatorError, match="pinned"):
                call(ids[8 * page :])
        with pytest.raises(AllocatorError, match="pinned 2 times"):
            allocator.clear()
        assert capacities(sample) == before
        assert allocator.full.allocated_count() == 8 * page
        allocator.unpin(kept)
        with pytest.raises(AllocatorError, match="pinned"):
            allocator.free(kept)
        allocator.unpin(kept)
        with pytest.raises(AllocatorError, match="not pinned"):
            allocator.unpin(kept)
        assert allocator.compact() > 0
        sample.check(ids[8 * page :])
        allocator.free(ids[8 * page :])
        assert allocator.verify_byte_accounting() == []

    @pytest.mark.parametrize("swapped", [False, True])
    def test_a_pinned_frontier_walls_off_what_lies_behind_it(self, driver: Driver, swapped: bool) -> None:
        with HybridSample(driver, page_size=4, reserved=False, swapped=swapped) as sample:
            allocator, page = sample.allocator, sample.page_size
            rest = allocator.alloc(allocator.full_available_size() - 4 * page, swa_tail_len=0)
            assert rest is not None
            kept = allocated(allocator, page)  # on the full side far out, at the other end of the arena
            allocator.free(rest)
            free = allocator.available_size()
            allocator.pin(kept)
            available = allocator.available_size()
            assert 0 < available < free
            assert allocator.alloc(available + page) is None
            allocated(allocator, available)
            assert allocator.available_size() == 0
            assert allocator.verify_byte_accounting() == []

    def test_reading_what_has_no_page_gives_the_sink(self, sample: HybridSample) -> None:
        allocator, device = sample.allocator, sample.pool.device
        ids = allocated(allocator, 8)
        odd = torch.tensor([0, 3, -1, 1 << 40, allocator.max_slots + 7, int(ids[5])], device=device)
        physical = allocator.translate_kv_loc(odd)
        assert physical.tolist()[:5] == [0] * 5
        assert physical[5] == allocator.transfer_pages(ids[5:6], "full")[0] * 4 + 1
        out = torch.full((2, 4), -1, device=device)
        assert allocator.translate_kv_loc(ids.view(2, 4).to(device, torch.int32), out=out) is out
        assert torch.equal(allocator.translate_kv_loc(ids.to(device)).view(2, 4), out)
        assert torch.equal(allocator.translate_kv_loc(ids), out.view(-1).cpu())
        pages = allocator.full.page_table(ids[::4].to(device) // 4)
        assert pages.tolist() == allocator.transfer_pages(ids, "full").tolist()
        allocator.free_swa(ids[:4])
        assert allocator.translate_loc_from_full_to_swa(ids.to(device))[:4].tolist() == [0] * 4
        with pytest.raises(AllocatorError, match="1 of 2 pages"):
            allocator.transfer_pages(ids, "swa")
        with pytest.raises(AllocatorError, match="no side"):
            allocator.transfer_pages(ids, "mamba")  # type: ignore[arg-type]

    def test_a_long_sequence_takes_window_pages_for_its_tail_only(self, sample: HybridSample) -> None:
        allocator = sample.allocator
        ids = allocator.alloc(32, swa_tail_len=6)
        assert ids is not None
        assert (allocator.full.allocated_count(), allocator.swa.allocated_count()) == (32, 8)
        assert len(allocator.transfer_pages(ids[-8:], "swa")) == 2
        allocator.free(ids)
        assert allocator.verify_byte_accounting() == []
        for tail in (-1, 33, True):
            with pytest.raises(AllocatorError, match="tail"):
                allocator.alloc(32, swa_tail_len=tail)
