"""What must stay free, term by term, and how a pool and a limit of requests are decided from it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvarena.pool.reserve import MeasuredStep, Reserve, ReserveError, StepPeaks, decide, reserve_of

GIB = 1 << 30
STEPS = (
    MeasuredStep("prefill", 2 * GIB),
    MeasuredStep("decode", 1 * GIB, 256),
    MeasuredStep("decode", 6 * GIB, 4096),
    MeasuredStep("sampling", 8 * GIB, 4096),
    MeasuredStep("sampling", GIB // 2, 256),
)


def test_the_largest_step_decides() -> None:
    peaks = StepPeaks(STEPS)
    assert peaks.at(4096) == ("sampling", 8 * GIB)
    assert peaks.at(256) == ("prefill", 2 * GIB)


def test_between_two_measured_numbers_of_requests_a_step_grows_in_a_straight_line() -> None:
    halfway = (256 + 4096) // 2
    assert StepPeaks(STEPS).at(halfway) == ("sampling", GIB // 2 + (8 * GIB - GIB // 2) // 2)


def test_below_the_fewest_measured_requests_a_step_takes_as_much_as_there() -> None:
    assert StepPeaks([MeasuredStep("decode", GIB, 256)]).at(1) == ("decode", GIB)


def test_more_requests_never_count_as_less_memory() -> None:
    peaks = StepPeaks([MeasuredStep("decode", 5, 10), MeasuredStep("decode", 3, 20)])
    assert peaks.at(20) == ("decode", 5)


def test_more_requests_than_were_measured_are_refused() -> None:
    with pytest.raises(ReserveError, match="4097 running requests were not measured, at most 4096"):
        StepPeaks(STEPS).at(4097)


@pytest.mark.parametrize("value", [-1, True, 1.5, "8"])
def test_figures_that_are_not_counts_are_refused(value: object) -> None:
    with pytest.raises(ReserveError, match="not a count"):
        MeasuredStep("decode", value)  # type: ignore[arg-type]


@pytest.mark.parametrize("margin", [-0.1, float("nan"), float("inf")])
def test_a_margin_that_is_not_a_share_is_refused(margin: float) -> None:
    with pytest.raises(ReserveError, match="margin"):
        reserve_of(StepPeaks(STEPS), 256, margin=margin)


def test_no_steps_are_refused() -> None:
    with pytest.raises(ReserveError, match="No step was measured"):
        StepPeaks([])


def test_a_reserve_explains_every_term() -> None:
    reserve = Reserve("sampling", 8 * GIB, 0.5, (("staging ring", 4 * GIB),), GIB, 2 * GIB)
    assert reserve.total_bytes == 17 * GIB
    assert reserve.explain() == (
        "17.00 GiB = step 'sampling' 8.00 + 50% margin + staging ring 4.00 + headroom 1.00"
    )
    told = json.loads(json.dumps(reserve.as_json()))
    assert told["total_bytes"] == 17 * GIB
    assert told["later"] == {"staging ring": 4 * GIB}


def test_the_floor_counts_where_the_step_is_smaller() -> None:
    reserve = Reserve("decode", GIB // 2, 0.5, floor_bytes=3 * GIB // 2)
    assert reserve.total_bytes == 3 * GIB // 2
    assert reserve.explain() == "1.50 GiB = the floor 1.50 (step 'decode' takes 0.50)"


def test_a_reserve_that_fits_leaves_the_pool_the_rest() -> None:
    found = decide(
        StepPeaks(STEPS),
        available_bytes=140 * GIB,
        unmodified_bytes=120 * GIB,
        limit=4096,
        min_limit=256,
        limit_is_fixed=False,
        margin=0.5,
    )
    assert (found.pool_bytes, found.max_requests, found.yields) == (128 * GIB, 4096, "")


def test_the_limit_yields_and_not_the_tokens() -> None:
    found = decide(
        StepPeaks(STEPS),
        available_bytes=140 * GIB,
        unmodified_bytes=134 * GIB,
        limit=4096,
        min_limit=256,
        limit_is_fixed=False,
        margin=0.5,
    )
    assert found.yields == "requests"
    assert found.pool_bytes >= 134 * GIB
    assert found.pool_bytes + found.reserve.total_bytes == 140 * GIB
    # One request more would not fit.
    assert reserve_of(StepPeaks(STEPS), found.max_requests + 1, margin=0.5).total_bytes > 6 * GIB


def test_an_explicit_limit_is_kept_and_the_tokens_yield() -> None:
    found = decide(
        StepPeaks(STEPS),
        available_bytes=140 * GIB,
        unmodified_bytes=134 * GIB,
        limit=4096,
        min_limit=256,
        limit_is_fixed=True,
        margin=0.5,
    )
    assert (found.pool_bytes, found.max_requests, found.yields) == (128 * GIB, 4096, "tokens")


def test_a_reserve_that_no_limit_makes_fit_leaves_the_unmodified_size() -> None:
    found = decide(
        StepPeaks(STEPS),
        available_bytes=140 * GIB,
        unmodified_bytes=139 * GIB,
        limit=4096,
        min_limit=256,
        limit_is_fixed=False,
        margin=0.5,
    )
    assert (found.pool_bytes, found.max_requests, found.yields) == (139 * GIB, 256, "reserve")


@given(
    available=st.integers(0, 200 * GIB),
    unmodified=st.integers(0, 200 * GIB),
    limit=st.integers(1, 4096),
    min_limit=st.integers(0, 4096),
    fixed=st.booleans(),
    margin=st.floats(0, 3),
    peaks=st.lists(st.integers(0, 40 * GIB), min_size=3, max_size=3),
    headroom=st.integers(0, 4 * GIB),
)
def test_what_is_decided_is_never_less_than_unmodified_and_never_more_than_there_is(
    available: int,
    unmodified: int,
    limit: int,
    min_limit: int,
    fixed: bool,
    margin: float,
    peaks: list[int],
    headroom: int,
) -> None:
    measured = StepPeaks(
        [
            MeasuredStep("prefill", peaks[0]),
            MeasuredStep("decode", peaks[1], limit),
            MeasuredStep("decode", peaks[2], max(1, limit // 2)),
        ]
    )
    found = decide(
        measured,
        available_bytes=available,
        unmodified_bytes=unmodified,
        limit=limit,
        min_limit=min_limit,
        limit_is_fixed=fixed,
        margin=margin,
        headroom_bytes=headroom,
    )
    assert 0 <= found.pool_bytes <= available
    assert 1 <= found.max_requests <= limit
    if found.yields != "tokens":
        assert found.pool_bytes >= min(unmodified, available)
    if found.yields != "reserve":
        assert found.pool_bytes + found.reserve.total_bytes <= available
    if fixed:
        assert found.max_requests == limit
