"""Tokens of a pool, in the unified pool's own arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvarena.plugin.commands.plan.capacity import (
    Capacity,
    Split,
    capacity,
    fits,
    floor_bytes,
    requests_of,
    smallest_bytes,
)
from kvarena.plugin.commands.plan.errors import GeometryError, PlanError
from kvarena.plugin.commands.plan.ranks import RankGeometry, SubPool, split_layers

GIB = 1 << 30


def stage(*pools: SubPool) -> RankGeometry:
    return RankGeometry(stage=0, tp=1, layers=range(1), sub_pools=pools)


def full(entry: int, layers: int = 1) -> SubPool:
    return SubPool("full", "full", tuple(range(layers)), (entry,) * layers)


def swa(entry: int, window: int) -> SubPool:
    return SubPool("swa", "swa", (0,), (entry,), window=window)


def state(entry: int) -> SubPool:
    return SubPool("mamba", "mamba", (0,), (entry,), per_request=True)


def test_the_stage_with_fewest_tokens_decides_not_the_one_with_fewest_bytes():
    # 56 layers in 20 GiB against 8 layers in 4 GiB, 4096 B a layer and token, besides the sinks.
    heavy, light = stage(full(4096, 56)), stage(full(4096, 8))
    totals = [20 * GIB + heavy.sink_bytes(16), 4 * GIB + light.sink_bytes(16)]
    found = capacity([heavy, light], totals, page_size=16, split=Split())
    assert found.tokens == 93616
    needed = smallest_bytes(light, {"full": found.tokens}, 16)
    assert needed == 8 * 4096 * 93616 + light.sink_bytes(16)


def test_the_sink_is_the_largest_envelope_and_a_state_is_one_page():
    assert stage(swa(512, 64), full(1024)).sink_bytes(16) == 16 * 1024
    assert stage(state(100_000), full(1024)).sink_bytes(16) == 100_000
    assert stage(state(1000), full(1024)).sink_bytes(16) == 16 * 1024


def test_windows_take_their_ratio_of_the_full_tokens():
    built = stage(swa(1000, 64), full(1000))
    # Page size 1: one sink page, then 0.8 window tokens for each full one: 1 + 5 / 4 * 4 + 4 = 10 pages.
    found = capacity([built], 10_000, page_size=1, split=Split(swa_full_tokens_ratio=0.8))
    assert (found.tokens, found.window_tokens) == (5, 4)


def test_each_sub_pool_starts_at_a_page_of_its_own():
    # The sink is 300 B; window pages of 100 B take 300..500; full pages of 300 B start at 600.
    built = stage(swa(100, 8), full(300))
    assert smallest_bytes(built, {"swa": 2, "full": 1}, 1) == 900
    assert not fits(built, {"swa": 2, "full": 1}, 1, 899)
    # Nothing is lost where a kind holds nothing.
    assert smallest_bytes(built, {"swa": 0, "full": 1}, 1) == 600


def test_states_follow_the_memory_ratio_where_no_requests_are_given():
    built = stage(state(1000), full(10))
    found = capacity([built], 100_000, page_size=1, split=Split(mamba_full_memory_ratio=1.0))
    assert found.states == 49  # half of it, less the sink
    assert found.tokens == (100_000 - 50_000) // 10
    only = capacity([stage(state(1000))], 100_000, page_size=1, split=Split())
    assert (only.tokens, only.states) == (None, 99)


def test_a_pool_below_its_states_is_empty():
    found = capacity([stage(state(1000), full(10))], 5_000, page_size=1, split=Split(running_requests=8))
    assert (found.tokens, found.states, found.empty) == (0, 0, True)


def test_one_request_is_charged_a_window_a_page_and_a_state():
    built = stage(state(4096), swa(16, 100), full(16))
    assert built.floor_terms(16) == [("mamba", 1), ("swa", 128), ("full", 16)]
    assert built.floor_terms(16, context_len=40) == [("mamba", 1), ("swa", 48), ("full", 48)]
    floor = floor_bytes(built, 16)
    assert floor == 4096 + 4096 + 128 * 16 + 16 * 16
    assert fits(built, {"mamba": 1, "swa": 128, "full": 16}, 16, floor)
    assert not fits(built, {"mamba": 1, "swa": 128, "full": 16}, 16, floor - 1)


def test_requests_follow_the_split_that_the_tokens_have():
    built = stage(state(4096), swa(16, 100), full(16))

    def requests(tokens, window_tokens, states, context):
        return requests_of([built], Capacity(tokens, window_tokens, states, 0), context, page_size=16)

    assert requests(8192 * 3, 12_800, 9, 8192) == 3  # the full side decides, whatever the windows have left
    assert requests(8192 * 9, 256, 9, 8192) == 2  # then the windows of 128
    assert requests(8192 * 9, 12_800, 4, 8192) == 4  # then the states
    assert requests(8192 * 3 - 1, 12_800, 9, 8192) == 2


@given(
    total=st.integers(0, 1 << 42),
    page_size=st.sampled_from([1, 16, 64]),
    ratio=st.floats(0.01, 1),
    requests=st.one_of(st.none(), st.integers(1, 64)),
    entries=st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.integers(1, 1 << 28)),
)
def test_what_is_promised_fits_and_one_page_more_does_not(total, page_size, ratio, requests, entries):
    built = stage(state(entries[2]), swa(entries[0], 128), full(entries[1]))
    split = Split(swa_full_tokens_ratio=ratio, running_requests=requests)
    found = capacity([built], total, page_size=page_size, split=split)
    if found.empty or found.tokens is None:
        return
    slots = {"mamba": found.states, "swa": found.window_tokens, "full": found.tokens}
    assert fits(built, slots, page_size, total)
    more = found.tokens + page_size
    window = int(more * ratio) // page_size * page_size
    assert not fits(built, {"mamba": found.states, "swa": window, "full": more}, page_size, total)


def test_layers_are_split_as_sglang_splits_them():
    assert [len(part) for part in split_layers(61, 4)] == [15, 15, 15, 16]
    assert split_layers(10, 2, [3, 7]) == [range(3), range(3, 10)]
    with pytest.raises(GeometryError, match="2 layers cannot be split into 3"):
        split_layers(2, 3)
    with pytest.raises(GeometryError, match="does not split 10 layers into 2"):
        split_layers(10, 2, [3, 6])


@pytest.mark.parametrize(
    "arguments", [{"swa_full_tokens_ratio": 0.0}, {"swa_full_tokens_ratio": 1.5}, {"running_requests": 0}]
)
def test_a_split_that_cannot_be_is_refused(arguments):
    with pytest.raises(PlanError):
        Split(**arguments)
