from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from kvarena.pool import RanksDisagreeError, agree


class Ranks:
    """Exchanges values between threads, as a collective would between processes."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=10)
        self._values: list[int | str] = [0] * count

    def gather_as(self, rank: int, value: int | str) -> Sequence[int | str]:
        self._values[rank] = value
        self._barrier.wait()
        return list(self._values)


def outcomes(values: Sequence[int | str]) -> list[int | RanksDisagreeError]:
    ranks, found = Ranks(len(values)), list[int | RanksDisagreeError]([0] * len(values))

    def run(rank: int) -> None:
        try:
            found[rank] = agree(values[rank], lambda value: ranks.gather_as(rank, value))
        except RanksDisagreeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_rank_takes_the_minimum_of_tokens() -> None:
    assert outcomes([131072, 93616, 131072]) == [93616] * 3


def test_one_ranks_failure_is_every_ranks_with_its_reason() -> None:
    for error in outcomes([4096, "out of memory: 8 bytes too few.", 0]):
        assert isinstance(error, RanksDisagreeError)
        assert error.failures == {1: "out of memory: 8 bytes too few.", 2: "it has 0 tokens"}
        assert "2 of 3 ranks" in str(error)
        assert "rank 1: out of memory: 8 bytes too few; rank 2: it has 0 tokens. Give" in str(error)


def test_without_a_gather_the_values_are_all_there() -> None:
    assert agree([64, 32]) == agree(32) == 32
    with pytest.raises(RanksDisagreeError, match="0 of 0"):
        agree([])
    with pytest.raises(TypeError, match="own value"):
        agree([1, 2], lambda value: [value])


def test_a_count_of_any_kind_counts() -> None:
    # Only ints were compared: a numpy 3 beside a 5 agreed on 5, which the first rank cannot hold.
    assert agree([np.int64(3), 5]) == 3  # type: ignore[list-item]
    assert agree(np.int64(3), lambda value: [value, 5]) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("none", [3.0, float("nan"), None, True, np.array([3, 4])])
def test_what_is_no_count_is_that_ranks_failure(none: object) -> None:
    with pytest.raises(RanksDisagreeError) as caught:
        agree([5, none])  # type: ignore[list-item]
    assert list(caught.value.failures) == [1]
    # The others wait in the exchange, so this rank must take part in it.
    with pytest.raises(RanksDisagreeError):
        agree(none, lambda value: [5, value])  # type: ignore[arg-type]
