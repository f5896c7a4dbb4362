from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvarena.pool import (
    HostVmm,
    LayoutError,
    MambaSubPoolSpec,
    MHASubPoolSpec,
    PoolCost,
    PoolSizeError,
    SubPoolCost,
    UnifiedKVPool,
    UnifiedSWATokenToKVPoolAllocator,
    agree,
    tokens_for_budget,
)

GIB = 1 << 30


def stage(layers: int) -> PoolCost:
    """A pipeline stage of vllm-project/vllm#34080: 4096 bytes a layer and token, pages of 16."""
    return PoolCost((SubPoolCost("full", 16 * layers * 4096, 16),), page_size=16)


def test_the_stage_with_the_least_memory_need_not_be_the_bottleneck() -> None:
    many, few = stage(56), stage(8)
    tokens = [tokens_for_budget(many, 20 * GIB), tokens_for_budget(few, 4 * GIB)]
    assert tokens == [93616, 131072]
    agreed = agree(tokens)
    assert agreed == 93616
    assert few.budget_bytes(agreed) == 8 * 4096 * 93616
    assert few.total_bytes(agreed) == 8 * 4096 * 93616 + few.sink_bytes


def test_states_come_off_the_budget_first() -> None:
    """huggingface/transformers#48566 and its like: states cost by the request, not by the token."""
    specs = [
        MambaSubPoolSpec("mamba", "up", 2, ((3, 5),), (4, 4), torch.float16),
        MHASubPoolSpec("full", "down", 4, 2, 8, torch.float16),
    ]
    few = PoolCost.of(specs, 16, fixed_slots={"mamba": 4})
    many = PoolCost.of(specs, 16, fixed_slots={"mamba": 64})
    tokens = tokens_for_budget(few, 1 << 20), tokens_for_budget(many, 1 << 20)
    states = 60 * specs[0].entry_bytes()
    assert tokens[0] - tokens[1] in range(states // 512 - 32, states // 512 + 33)


def test_a_window_costs_no_more_than_its_requests_see() -> None:
    specs = [
        MHASubPoolSpec("full", "up", 1, 1, 8, torch.float16),
        MHASubPoolSpec("swa", "down", 5, 1, 8, torch.float16),
    ]
    capped = PoolCost.of(specs, 8, max_slots={"swa": 64})
    # In multiples of 40 tokens, so that the window's envelopes of 1280 bytes begin where the full ones end.
    assert capped.budget_bytes(800_000) - capped.budget_bytes(400_000) == 400_000 * 32
    shared = PoolCost.of(specs, 8, ratios={"swa": Fraction(1, 5)})
    assert shared.budget_bytes(8000) == 8000 * 32 + 1600 * 160


def test_the_error_names_the_least_budget_that_works() -> None:
    cost = stage(8)
    with pytest.raises(PoolSizeError) as refused:
        tokens_for_budget(cost, 10 << 20, floor_tokens=4096)
    minimum = refused.value.minimum
    assert (minimum, refused.value.requested) == (4096 * 8 * 4096, 10 << 20)
    assert str(minimum) in str(refused.value)
    assert tokens_for_budget(cost, minimum, floor_tokens=4096) == 4096
    with pytest.raises(PoolSizeError):
        tokens_for_budget(cost, minimum - 1, floor_tokens=4096)
    with pytest.raises(PoolSizeError, match="4095 tokens"):
        tokens_for_budget(cost, minimum, floor_tokens=4096, cap_tokens=4095)
    # What single sub-pools need counts too.
    assert tokens_for_budget(cost, minimum, floor_slots={"full": 4096}) == 4096
    with pytest.raises(PoolSizeError):
        tokens_for_budget(cost, minimum - 1, floor_slots={"full": 4096})


def test_a_cap_bounds_what_does_not_grow() -> None:
    cost = PoolCost((SubPoolCost("swa", 100, 10, max_slots=50),), page_size=10)
    assert tokens_for_budget(cost, 10**6, cap_tokens=12345) == 12340
    with pytest.raises(PoolSizeError, match="Any number"):
        tokens_for_budget(cost, 10**6)
    with pytest.raises(LayoutError):
        PoolCost(())


@given(
    page=st.sampled_from([1, 4, 16]),
    full=st.integers(1, 999),
    swa=st.integers(1, 999),
    ratio=st.fractions(0, 1),
    cap=st.none() | st.integers(0, 500),
    budget=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=100, database=None)
def test_what_is_found_is_the_most_that_fits(
    page: int, full: int, swa: int, ratio: Fraction, cap: int | None, budget: int
) -> None:
    cost = PoolCost(
        (SubPoolCost("full", page * full, page), SubPoolCost("swa", page * swa, page, ratio, cap)), page
    )
    minimum = cost.budget_bytes(page)
    if budget < minimum:
        with pytest.raises(PoolSizeError) as refused:
            tokens_for_budget(cost, budget)
        assert refused.value.minimum == minimum
        return
    tokens = tokens_for_budget(cost, budget)
    assert tokens % page == 0
    assert cost.budget_bytes(tokens) <= budget < cost.budget_bytes(tokens + page)


@given(
    page=st.sampled_from([1, 3, 4]),
    heads=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    tokens=st.integers(1, 200),
)
@settings(deadline=None, max_examples=40, database=None)
def test_a_pool_of_the_bytes_found_really_holds_the_tokens(
    page: int, heads: tuple[int, int], tokens: int
) -> None:
    specs = [
        MHASubPoolSpec(name, direction, 1, count, 3, torch.uint8)  # type: ignore[arg-type]
        for name, direction, count in zip(("full", "swa"), ("up", "down"), heads, strict=True)
    ]
    cost = PoolCost.of(specs, page)
    total = cost.total_bytes(tokens)
    for nbytes, fits in ((total, True), (total - 1, False)):
        pool = UnifiedKVPool(
            total_bytes=nbytes,
            sub_pool_specs=specs,
            driver=HostVmm(),
            page_size=page,
            bs1_floor_terms=(),
        )
        held = UnifiedSWATokenToKVPoolAllocator(pool).available_size()
        pool.close()
        assert (held >= tokens) is fits
        if fits:
            assert held == -(-tokens // page) * page
        if pool.floor_bytes == total:
            break
