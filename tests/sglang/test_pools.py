"""Reserve, finalize and resize on SGLang's own classes: equal to a pool that was built at that size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvarena.hooks import HookError, hookimpl
from kvarena.plugin.engines.sglang.bound import bound_of
from kvarena.plugin.engines.sglang.construct import sink_bytes_of
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.pool import PoolSizeError
from kvarena.pool.errors import AllocatorError, PoolStateError
from kvarena.pool.testing import mapped_within, no_leaks

pytestmark = pytest.mark.sglang

PAGE_SIZES = (1, 4, 64)
MODES = pytest.mark.parametrize("lazy", [False, True], ids=["eager-compaction", "lazy-compaction"])
SIZES = pytest.mark.parametrize("page_size", PAGE_SIZES)


def tensors_of(bundle: Any) -> list[torch.Tensor]:
    """Whatever a captured graph may hold: bytes, views, page tables."""
    parts = bundle.kv.full_kv_pool, bundle.kv.swa_kv_pool
    views = [view for part in parts for view in (*part.k_buffer, *part.v_buffer)]
    tables = [t for side in bundle.sides for t in (side.virtual_to_physical, side.physical_to_virtual)]
    return [bundle.pool._raw, *views, *tables]


@SIZES
def test_only_the_sink_is_backed_before_capture(rig: Any, page_size: int) -> None:
    bundle = rig.reserved(64 * page_size, 32 * page_size, page_size=page_size)
    bound = bundle.bound
    assert bundle.kv.post_capture_active is True
    assert bundle.kv.post_capture_backed_bytes == bound.arena.backed_bytes
    assert bound.sink_bytes == max(s.entry_bytes() for s in bundle.pool.sub_pool_specs) * page_size
    granularity = bound.driver.granularity
    assert bound.arena.backed_bytes == -(-bound.sink_bytes // granularity) * granularity
    assert len(bound.arena.mappings) == 1
    sink = bundle.pool._raw[: bound.sink_bytes]
    assert sink.device.type == "cpu"
    assert not sink.any()
    sink.fill_(7)  # a captured graph writes here
    assert bundle.pool._raw.data_ptr() == bound.arena.base


@SIZES
def test_views_are_those_of_an_eager_pool(rig: Any, page_size: int) -> None:
    bundle = rig.reserved(64 * page_size, 32 * page_size, page_size=page_size)
    eager = rig.eager(64 * page_size, 32 * page_size, page_size=page_size)
    ours, theirs = tensors_of(bundle), tensors_of(eager)
    assert len(ours) == len(theirs) > 10
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.stride(), a.storage_offset(), a.dtype) == (
            b.shape,
            b.stride(),
            b.storage_offset(),
            b.dtype,
        )


@MODES
@SIZES
def test_finalized_equals_eager_in_every_number(
    rig: Any, rig_module: Any, page_size: int, lazy: bool
) -> None:
    big, small = (64 * page_size, 32 * page_size), (41 * page_size, 21 * page_size)
    bundle = rig.reserved(*big, page_size=page_size, lazy=lazy)
    before = [tensor.data_ptr() for tensor in tensors_of(bundle)]
    bundle.resize(rig.config(*small))
    eager = rig.eager(*small, page_size=page_size, lazy=lazy)
    assert rig_module.scalars(bundle) == rig_module.scalars(eager)
    assert [tensor.data_ptr() for tensor in tensors_of(bundle)] == before
    assert bundle.bound.active_allocation_bytes == rig.total_bytes(*small)
    assert len(bundle.bound.arena.mappings) == 1
    assert not bundle.pool._raw[: rig.total_bytes(*small)].any()


@pytest.mark.parametrize("odd", [4, 100, 1000])
def test_bytes_that_are_no_whole_pages_are_those_of_an_eager_pool(
    rig: Any, rig_module: Any, odd: int
) -> None:
    if rig.release.number <= 18:
        pytest.skip("up to 0.5.18, bytes are derived from tokens alone")
    nbytes = rig.total_bytes(164, 84) + odd * 4
    bundle = rig.reserved(256, 128)
    bundle.resize(rig.config(164, 84, nbytes))
    eager = rig.eager(164, 84, nbytes=nbytes)
    assert rig_module.scalars(bundle) == rig_module.scalars(eager)


@MODES
@SIZES
def test_the_whole_capacity_is_allocated_and_freed(rig: Any, page_size: int, lazy: bool) -> None:
    bundle = rig.reserved(64 * page_size, 32 * page_size, page_size=page_size, lazy=lazy)
    bundle.resize(rig.config(41 * page_size, 21 * page_size))
    allocator, end = bundle.allocator, bundle.bound.active_allocation_bytes
    capacity = allocator.available_size()
    assert capacity > 0
    for _ in range(3):
        locations = allocator.alloc(capacity)
        assert len(locations) == capacity
        assert len(set(locations.tolist())) == capacity
        assert allocator.alloc(page_size) is None
        for side, tokens in zip(bundle.sides, (locations, locations), strict=True):
            pages = side.virtual_to_physical[torch.unique(tokens // page_size)]
            assert int(pages.min()) >= side.min_page_index
            spec = bundle.pool.spec(side.sub_pool_name)
            assert (int(pages.max()) + 1) * page_size * spec.entry_bytes() <= end
        allocator.free(locations)
        assert allocator.available_size() == capacity


def test_every_page_can_be_written_and_keeps_what_was_written(rig: Any) -> None:
    bundle = rig.reserved(256, 128)
    bundle.resize(rig.config(164, 84))
    allocator = bundle.allocator
    locations = allocator.alloc(allocator.available_size())
    pages = torch.unique(locations // 4)
    raw = bundle.pool._raw
    for side, mark in zip(bundle.sides, (3, 5), strict=True):
        nbytes = 4 * bundle.pool.spec(side.sub_pool_name).entry_bytes()
        for page in side.virtual_to_physical[pages].tolist():
            assert not (raw[page * nbytes : (page + 1) * nbytes] != 0).any(), "two pages share bytes"
            raw[page * nbytes : (page + 1) * nbytes].fill_(mark)


def test_a_pool_that_was_not_planned_is_stocks_own(rig: Any) -> None:
    eager = rig.eager(256, 128)
    assert bound_of(eager.pool) is None
    assert eager.kv.post_capture_active is False
    assert eager.kv.post_capture_backed_bytes == 0
    assert eager.pool._raw.is_cpu


def test_sizes_that_cannot_be_are_refused_and_nothing_changes(rig: Any, rig_module: Any) -> None:
    bundle = rig.reserved(256, 128)
    bound, before = bundle.bound, rig_module.scalars(bundle)
    floor = bound.floor_bytes
    assert floor >= 12 * rig_module.SWA_ENTRY  # the window and a page of slack
    for nbytes, named in ((rig.total_bytes(257, 128), "reserved"), (floor - 1, str(floor)), (None, "None")):
        config = rig.config(256, 128)
        config.unified_memory_pool_bytes = nbytes
        with pytest.raises(PoolSizeError, match=named):
            bundle.kv.finalize_backing(config)
        assert rig_module.scalars(bundle) == before
        assert bound.active_allocation_bytes == bound.sink_bytes
    bundle.resize(rig.config(8, 8, floor))
    assert bound.active_allocation_bytes == floor


def test_resize_is_refused_where_it_would_corrupt(rig: Any) -> None:
    bundle = rig.reserved(256, 128)
    config = rig.config(164, 84)
    with pytest.raises(PoolStateError, match="before the pool is finalized"):
        bundle.allocator.resize(config)
    bundle.kv.finalize_backing(config)
    with pytest.raises(PoolStateError, match="finalized already"):
        bundle.kv.finalize_backing(config)
    with pytest.raises(PoolStateError, match=str(rig.total_bytes(164, 84))):
        bundle.allocator.resize(rig.config(160, 84))
    bundle.allocator.resize(config)
    locations = bundle.allocator.alloc(8)
    with pytest.raises(AllocatorError, match="8 tokens are allocated"):
        bundle.allocator.resize(config)
    bundle.allocator.free(locations)


def test_close_lets_go_of_everything(rig: Any) -> None:
    with no_leaks():
        bundle = rig.reserved(256, 128)
        bundle.resize(rig.config(164, 84))
        bound = bundle.bound
        base, reserved = bound.arena.base, bound.arena.reserved_bytes
        bound.close()
        bound.close()
    assert not mapped_within(base, reserved)


def test_a_hook_that_raises_at_the_start_is_named_and_leaves_nothing(rig: Any) -> None:
    class Broken:
        @hookimpl
        def kvarena_pool_reserved(self, pool: Any) -> None:
            raise ZeroDivisionError("an observer of anybody's")

    rig.reserved(256, 128).bound.close()  # what is made once stays
    rig.plug(Broken())
    with no_leaks(), pytest.raises(HookError, match="an observer of anybody's"):
        rig.reserved(256, 128)
    assert runtime.pools == []


def test_the_sink_covers_what_stock_reserves(rig: Any) -> None:
    """Stock computes the sink inside its constructor (and, since 0.5.19, in a function of its own)."""
    bundle = rig.reserved(256, 128)
    sink = sink_bytes_of(bundle.pool)
    for spec in bundle.pool.sub_pool_specs:
        assert bundle.pool.min_slot_index(spec.name) == -(-sink // spec.entry_bytes())
    floor = getattr(rig.release.pools, "_reserved_floor_bytes", None)
    if floor is not None:
        assert floor(bundle.pool.sub_pool_specs, 4) == sink
