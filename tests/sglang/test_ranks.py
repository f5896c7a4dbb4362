"""Two real processes over gloo: one size for both, and one rank's failure undoes both. Needs no SGLang."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.engines.sglang.ranks import Ranks, Report
from kvarena.pool.sizing import RanksDisagreeError

Pair = Callable[[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Run a scenario on two ranks and give back what each saw."""
    sys.path.insert(0, str(Path(__file__).parent))
    import rank_scenarios

    context = multiprocessing.get_context("spawn")
    init = f"file://{tmp_path_factory.mktemp('gloo') / 'store'}"
    inboxes, outbox = [context.Queue() for _ in range(2)], context.Queue()
    ranks = [
        context.Process(target=rank_scenarios.serve, args=(rank, 2, init, inboxes[rank], outbox), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()

    def run(scenario: dict[str, Any]) -> list[dict[str, Any]]:
        for inbox in inboxes:
            inbox.put(scenario)
        seen = dict(outbox.get(timeout=100) for _ in range(2))
        assert all("broken" not in each for each in seen.values()), seen
        return [seen[0], seen[1]]

    yield run
    for inbox in inboxes:
        inbox.put(None)
    for process in ranks:
        process.join(timeout=30)
        if process.is_alive():
            process.kill()
    sys.path.remove(str(Path(__file__).parent))


def at_the_sink(seen: dict[str, Any]) -> bool:
    return not seen["finalized"] and seen["handles"] == 1 and seen["backed"] == 4096


def test_different_budgets_end_in_one_size(pair: Pair) -> None:
    a, b = pair({"budget": [500_000, 300_001]})
    assert a == b
    assert a["finalized"]
    assert 290_000 < a["total"] <= 300_001


def test_stages_of_different_depth_agree_on_tokens_not_on_bytes(pair: Pair) -> None:
    a, b = pair({"budget": [800_000, 300_000], "layers": [7, 1]})
    assert a["tokens"] == b["tokens"]
    assert a["total"] == 7 * b["total"]
    assert 790_000 < a["total"] <= 800_000  # the rank with more memory decides: it has more layers


def test_one_ranks_lack_of_memory_makes_both_smaller(pair: Pair) -> None:
    a, b = pair({"budget": [500_000, 500_000], "limit": [1 << 30, 400_000]})
    assert a == b
    assert a["finalized"]
    assert a["attempts"] >= 1
    assert 300_000 < a["total"] <= 400_000


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["early", "solver", "late"])
def test_one_ranks_failure_undoes_both_and_names_it(pair: Pair, failing: int, where: str) -> None:
    fail = ["", ""]
    fail[failing] = where
    seen = pair({"budget": [500_000, 500_000], "fail": fail})
    assert all(at_the_sink(each) for each in seen)
    other = seen[1 - failing]
    assert other["kind"] == "ranks"
    assert other["failed"] == [failing]
    assert f"rank {failing}: " in other["error"]
    assert ("no luck" if where != "solver" else "Not enough memory") in other["error"]
    assert pair({"budget": [300_000, 300_000]})[0]["finalized"], "the ranks are out of step"


def test_memory_that_never_suffices_is_an_error_on_both(pair: Pair) -> None:
    seen = pair({"budget": [500_000, 500_000], "limit": [1 << 30, 5000]})
    assert all(at_the_sink(each) for each in seen)
    assert [each["failed"] for each in seen] == [[1], [1]]
    assert "ENOMEM" in seen[0]["error"]


def test_alone() -> None:
    ranks = Ranks()
    assert ranks.count == 1
    assert ranks.exchange(Report("sized", tokens=5)) == [Report("sized", tokens=5)]
    with pytest.raises(RanksDisagreeError, match="rank 0: full"):
        ranks.agree(Report("sized", failure="full"))
