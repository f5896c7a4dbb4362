"""`verify_byte_accounting` finds what is wrong: every other test relies on its empty answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kvarena.pool import HostVmm, MultiEndedAllocator
from kvarena.pool.errors import AllocatorError, PoolStateError
from kvarena.pool.testing.allocator_samples import HybridSample


@pytest.fixture
def sample() -> Iterator[HybridSample]:
    with HybridSample(HostVmm(), page_size=4, reserved=False) as sample:
        yield sample


def _count_one_more(side: MultiEndedAllocator) -> None:
    side._span.live += 1


def _narrow_the_span(side: MultiEndedAllocator) -> None:
    side._span.low = side._span.high


def _leave_the_bounds(side: MultiEndedAllocator) -> None:
    side._span.floor = side._span.high + 1


def _count_a_block_twice(side: MultiEndedAllocator) -> None:
    side._span._block_used[0] += 1


def _unmap_a_page(side: MultiEndedAllocator) -> None:
    side._tables.p2v[int(side._span.used.argmax())] = -1


def _pin_a_free_page(side: MultiEndedAllocator) -> None:
    side._pins.counts[0] += 1


def _lose_a_free_id(side: MultiEndedAllocator) -> None:
    side._ids._count -= 1


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_count_one_more, "pages are marked as used, 5 are counted"),
        (_narrow_the_span, "are used outside the span"),
        (_leave_the_bounds, "leaves its bounds"),
        (_count_a_block_twice, "a block's counter differs"),
        (_unmap_a_page, "are not those that physical_to_virtual maps"),
        (_pin_a_free_page, "a pinned page is not in use"),
        (_lose_a_free_id, "virtual pages are free by the stack"),
    ],
)
def test_each_kind_of_harm_is_named_with_its_side(
    sample: HybridSample, harm: Callable[[MultiEndedAllocator], None], said: str
) -> None:
    assert sample.allocator.alloc(16) is not None
    assert sample.allocator.verify_byte_accounting() == []
    harm(sample.allocator.full)
    found = [what for what in sample.allocator.verify_byte_accounting() if said in what]
    assert [what.startswith("'full': ") for what in found] == [True]


def test_pages_of_a_pool_without_memory_are_found(
    sample: HybridSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sample.allocator.alloc(16) is not None
    monkeypatch.setattr(sample.pool, "finalized", False)
    said = " ".join(sample.allocator.verify_byte_accounting())
    assert "'full': 4 pages are in use, and not all its pages have memory" in said
    assert "'swa': 4 pages are in use, and not all its pages have memory" in said


def test_window_pages_of_no_id_are_found(sample: HybridSample) -> None:
    ids = sample.allocator.alloc(16)
    assert ids is not None
    sample.allocator.full._tables.v2p[int(ids[0]) // 4] = -1
    assert "1 window pages belong to no allocated id" in sample.allocator.verify_byte_accounting()


def test_which_slots_are_allocated(sample: HybridSample) -> None:
    allocator = sample.allocator
    ids = allocator.alloc(8)
    assert ids is not None
    for side in (allocator, allocator.full):
        assert all(side.is_slot_allocated(int(slot)) for slot in ids)
        # The sink, before it, and past the tables.
        assert not any(side.is_slot_allocated(slot) for slot in (0, 3, -4, -1, 1 << 40))
    allocator.free_swa(ids)
    assert not allocator.swa.is_slot_allocated(int(ids[0]))
    assert allocator.is_slot_allocated(int(ids[0]))
    allocator.free(ids)
    assert not any(allocator.is_slot_allocated(int(slot)) for slot in ids)


def test_one_side_frees_a_segment(sample: HybridSample) -> None:
    full = sample.allocator.full
    ids = full.alloc(16)
    assert ids is not None
    with pytest.raises(AllocatorError):
        full.free_segment(ids.flip(0), start_pos=0)
    assert full.allocated_count() == 16
    full.free_segment(ids[:14], start_pos=0)  # the last page is cut short
    assert full.allocated_count() == 0
    assert sample.allocator.verify_byte_accounting() == []


def test_only_the_two_ends_of_one_pool_are_peers(sample: HybridSample) -> None:
    with (
        HybridSample(HostVmm(), page_size=4, reserved=False) as other,
        pytest.raises(AllocatorError, match="are not the two ends of one pool"),
    ):
        sample.allocator.full.bind_peer(other.allocator.swa)
    with pytest.raises(AllocatorError, match="are not the two ends of one pool"):
        sample.allocator.full.bind_peer(MultiEndedAllocator(sample.pool, "full"))


def test_nothing_is_extended_before_the_pool_is_final() -> None:
    with (
        HybridSample(HostVmm(), page_size=4, reserved=True) as sample,
        pytest.raises(PoolStateError, match="not final yet"),
    ):
        sample.allocator.grow()
