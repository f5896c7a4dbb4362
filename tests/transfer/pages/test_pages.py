"""Page plans: every page where it belongs, in the fewest copies, across no seam."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvarena.transfer import PageCopies, PageError, PageSide, join_copies, plan_page_copies

PAGE = 8
SRC, DST = 1000, 9000


def fewest(pairs: list[tuple[int, int]], seams: tuple[set[int], set[int]]) -> int:
    """Copies that cover the pairs: one ends where its successor is absent or cut off."""
    have = set(pairs)
    src_seams, dst_seams = seams
    count = 0
    for s, d in pairs:
        joined = (s + 1, d + 1) in have
        cut = SRC + (s + 1) * PAGE in src_seams or DST + (d + 1) * PAGE in dst_seams
        inside = {seam - SRC - s * PAGE for seam in src_seams} | {seam - DST - d * PAGE for seam in dst_seams}
        count += (not joined or cut) + len({offset for offset in inside if 0 < offset < PAGE})
    return count


pairs_of_pages = st.lists(
    st.tuples(st.integers(0, 24), st.integers(0, 24)), max_size=24, unique_by=lambda pair: pair[1]
)
some_seams = st.sets(st.integers(0, 26 * PAGE), max_size=4)


@given(pairs_of_pages, some_seams, some_seams)
def test_plans_move_every_page_in_the_fewest_copies(
    pairs: list[tuple[int, int]], src_cuts: set[int], dst_cuts: set[int]
) -> None:
    src_seams, dst_seams = {SRC + cut for cut in src_cuts}, {DST + cut for cut in dst_cuts}
    plan = plan_page_copies(
        PageSide(SRC, [s for s, _ in pairs], sorted(src_seams)),
        PageSide(DST, [d for _, d in pairs], sorted(dst_seams)),
        PAGE,
    )
    moved = {
        (src + byte, dst + byte)
        for src, dst, nbytes in zip(*(column.tolist() for column in plan), strict=True)
        for byte in range(nbytes)
    }
    wanted = {(SRC + s * PAGE + byte, DST + d * PAGE + byte) for s, d in pairs for byte in range(PAGE)}
    assert moved == wanted
    assert plan.nbytes == len(wanted)
    assert len(plan.src) == fewest(pairs, (src_seams, dst_seams))
    for start, seams in ((plan.src, src_seams), (plan.dst, dst_seams)):
        assert not any(
            a < seam < a + n
            for a, n in zip(start.tolist(), plan.lengths.tolist(), strict=True)
            for seam in seams
        )


@given(
    pairs_of_pages,
    st.sampled_from([0, (1 << 31) - 26, (1 << 31) - 1, 1 << 31, 1 << 40]),
    st.sampled_from([0, (1 << 31) - 26, (1 << 31) - 1, 1 << 31, 1 << 40]),
)
def test_ids_of_any_size_make_the_same_plan(pairs: list[tuple[int, int]], far: int, away: int) -> None:
    """Small ids are sorted in one word a pair, large ones by two keys."""
    src, dst = [s for s, _ in pairs], [d for _, d in pairs]
    near = plan_page_copies(PageSide(0, src), PageSide(0, dst), PAGE)
    there = plan_page_copies(PageSide(0, [s + far for s in src]), PageSide(0, [d + away for d in dst]), PAGE)
    assert near.lengths.tolist() == there.lengths.tolist()
    assert (near.src + far * PAGE).tolist() == there.src.tolist()
    assert (near.dst + away * PAGE).tolist() == there.dst.tolist()


def test_runs_are_found_in_any_order() -> None:
    plan = plan_page_copies(PageSide(0, [7, 3, 6, 5]), PageSide(0, [17, 3, 16, 15]), 16384)
    assert [column.tolist() for column in plan] == [
        [3 * 16384, 5 * 16384],
        [3 * 16384, 15 * 16384],
        [16384, 3 * 16384],
    ]


def test_nothing_to_copy_is_an_empty_plan() -> None:
    plan = plan_page_copies(PageSide(0, []), PageSide(0, np.empty(0)), 16384)
    assert plan.nbytes == 0
    assert len(plan.src) == 0
    assert join_copies().nbytes == 0


def test_plans_of_sub_pools_become_one_batch() -> None:
    joined = join_copies(
        plan_page_copies(PageSide(0, [1]), PageSide(0, [2]), 8),
        plan_page_copies(PageSide(0, [1, 5]), PageSide(0, [3, 4]), 4),
    )
    assert [column.tolist() for column in joined] == [[8, 4, 20], [16, 12, 16], [8, 4, 4]]
    assert isinstance(joined, PageCopies)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([-1], [0], "source page -1 does not exist"),
        ([0], [10], "destination page 10 does not exist: there are 10"),
        ([10], [0], "source page 10 does not exist"),
        ([0, 1], [0], "2 source pages for 1 destination pages"),
        ([0, 1], [3, 3], "destination page 3 is given twice"),
        ([0.0], [0], "float64, not integers"),
        ([True], [0], "bool, not integers"),
        ([[0]], [0], "shape"),
        (["1"], [0], "not integers"),
        ([2**63], [0], "does not exist"),
        ([2**64], [0], "not integers"),
        ([[0], [1, 2]], [0], "no array"),
    ],
)
def test_page_ids_that_make_no_sense_are_refused(src: list[object], dst: list[object], message: str) -> None:
    with pytest.raises(PageError, match=message):
        plan_page_copies(
            PageSide(0, src, num_pages=10),  # type: ignore[arg-type]
            PageSide(0, dst, num_pages=10),  # type: ignore[arg-type]
            PAGE,
        )


@pytest.mark.parametrize("page_bytes", [0, -8])
def test_a_page_without_bytes_is_refused(page_bytes: int) -> None:
    with pytest.raises(PageError, match=f"{page_bytes} bytes"):
        plan_page_copies(PageSide(0, [0]), PageSide(0, [0]), page_bytes)


@pytest.mark.parametrize(("src", "base"), [([2**62], 0), ([0], 2**63), ([0], -1), ([2**64 - 1], 0)])
def test_addresses_that_do_not_exist_are_refused(src: list[int], base: int) -> None:
    with pytest.raises(PageError, match="no address"):
        plan_page_copies(PageSide(base, np.array(src, np.uint64)), PageSide(0, [0]), 16384)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_ids_of_any_integer_type(dtype: type) -> None:
    plan = plan_page_copies(
        PageSide(0, np.array([3, 4], dtype)), PageSide(0, np.array([7, 8], dtype)), 1 << 30
    )
    assert [column.tolist() for column in plan] == [[3 << 30], [7 << 30], [2 << 30]]
