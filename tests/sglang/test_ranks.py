"""Real processes over gloo: one size for all, and one rank's failure undoes all. Needs no SGLang."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.ranks import Alone, RankReport, raise_if_failed
from kvarena.pool.sizing import RanksDisagreeError

Run = Callable[[dict[str, Any]], list[dict[str, Any]]]


class Server:
    """So many ranks, each in a process of its own."""

    def __init__(self, count: int, directory: Path) -> None:
        sys.path.insert(0, str(Path(__file__).parent))
        try:
            import rank_scenarios

            context = multiprocessing.get_context("spawn")
            init = f"file://{directory / 'store'}"
            self.inboxes, self.outbox = [context.Queue() for _ in range(count)], context.Queue()
            self.ranks = [
                context.Process(
                    target=rank_scenarios.serve, args=(rank, count, init, inbox, self.outbox), daemon=True
                )
                for rank, inbox in enumerate(self.inboxes)
            ]
            for process in self.ranks:
                process.start()
        finally:
            sys.path.remove(str(Path(__file__).parent))

    def begin(self, scenario: dict[str, Any]) -> None:
        for inbox in self.inboxes:
            inbox.put(scenario)

    def seen(self, count: int) -> dict[int, dict[str, Any]]:
        """What the first `count` ranks saw that have an end to tell."""
        seen = dict(self.outbox.get(timeout=100) for _ in range(count))
        assert all("broken" not in each for each in seen.values()), seen
        return seen

    def run(self, scenario: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a scenario on all ranks and give back what each saw."""
        self.begin(scenario)
        return [each for _, each in sorted(self.seen(len(self.ranks)).items())]

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.ranks:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two ranks, for all tests that leave both alive."""
    server = Server(2, tmp_path_factory.mktemp("gloo"))
    yield server.run
    server.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Four ranks; the test in which one dies comes last."""
    server = Server(4, tmp_path_factory.mktemp("gloo"))
    yield server
    server.close()


def at_the_sink(seen: dict[str, Any]) -> bool:
    return not seen["finalized"] and seen["handles"] == 1 and seen["backed"] == 4096


def test_different_budgets_end_in_one_size(pair: Run) -> None:
    a, b = pair({"budget": [500_000, 300_001]})
    assert a == b
    assert a["finalized"]
    assert 290_000 < a["total"] <= 300_001


def test_stages_of_different_depth_agree_on_tokens_not_on_bytes(pair: Run) -> None:
    a, b = pair({"budget": [800_000, 300_000], "layers": [7, 1]})
    assert a["tokens"] == b["tokens"]
    assert a["total"] == 7 * b["total"]
    assert 790_000 < a["total"] <= 800_000  # the rank with more memory decides: it has more layers


def test_one_ranks_lack_of_memory_makes_both_smaller(pair: Run) -> None:
    a, b = pair({"budget": [500_000, 500_000], "limit": [1 << 30, 400_000]})
    assert a == b
    assert a["finalized"]
    assert a["attempts"] >= 1
    assert 300_000 < a["total"] <= 400_000


@pytest.mark.parametrize("retries", [[4, 0], [0, 4]])
def test_ranks_whose_settings_differ_stay_in_step(pair: Run, retries: list[int]) -> None:
    """Each host has an environment of its own; who would try again must not wait for who would not."""
    seen = pair({"budget": [500_000, 500_000], "limit": [1 << 30, 400_000], "retries": retries})
    assert all(at_the_sink(each) for each in seen)
    assert [each["failed"] for each in seen] == [[1], [1]]
    assert pair({"budget": [300_000, 300_000]})[0]["finalized"], "the ranks are out of step"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["solver", "back", "late", "hook"])
def test_one_ranks_failure_undoes_both_and_names_it(pair: Run, failing: int, where: str) -> None:
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


def test_memory_that_never_suffices_is_an_error_on_both(pair: Run) -> None:
    seen = pair({"budget": [500_000, 500_000], "limit": [1 << 30, 5000]})
    assert all(at_the_sink(each) for each in seen)
    assert [each["failed"] for each in seen] == [[1], [1]]
    assert "ENOMEM" in seen[0]["error"]


def test_alone() -> None:
    ranks = Alone()
    assert ranks.count == 1
    assert ranks.exchange(RankReport("sized", tokens=5)) == [RankReport("sized", tokens=5)]
    with pytest.raises(RanksDisagreeError, match="rank 0: full"):
        raise_if_failed(ranks.exchange(RankReport("sized", failure="full")), "sized")


def test_who_fails_before_ranks_meet_waits_for_nobody(pair: Run) -> None:
    """The others are in SGLang's own reduction then, and an exchange would hang with them."""
    seen = pair({"budget": [500_000, 500_000], "fail": ["early", "early"]})
    assert all(at_the_sink(each) for each in seen)
    assert [(each["kind"], each["exchanges"]) for each in seen] == [("own", 0), ("own", 0)]
    assert pair({"budget": [300_000, 300_000]})[0]["finalized"], "the ranks are out of step"


def test_a_rank_that_cannot_go_back_keeps_nobody_waiting(pair: Run) -> None:
    """Rank 1 cannot back its final size; rank 0 then fails to back its sink again."""
    a, b = pair({"budget": [500_000, 500_000], "fail": ["revert", "back"]})
    assert at_the_sink(b)
    assert [a["handles"], a["finalized"]] == [0, False]
    assert [each["failed"] for each in (a, b)] == [[1], [1]]
    assert pair({"budget": [300_000, 300_000]})[0]["finalized"], "the ranks are out of step"


def test_ranks_that_all_come_begin(pair: Run) -> None:
    for _ in range(2):
        assert pair({"comes": [True, True], "seconds": 60}) == [{"error": "", "fix": ""}] * 2
    assert pair({"budget": [300_000, 300_000]})[0]["finalized"], "the ranks are out of step"


@pytest.mark.parametrize("comes", [[True, True, False], [True, False, False], [False, True, True]])
def test_ranks_of_a_node_without_kvarena_are_missed_in_time(tmp_path: Path, comes: list[bool]) -> None:
    """SGLang's group would wait for two hours."""
    server = Server(3, tmp_path)
    server.begin({"comes": comes, "seconds": 4})
    seen = server.seen(sum(comes))
    for rank, inbox in enumerate(server.inboxes):
        if not comes[rank]:
            inbox.put("go on")
    seen |= server.seen(3 - sum(comes))
    server.close()
    missing = ", ".join(str(rank) for rank, came in enumerate(comes) if not came)
    for rank, came in enumerate(comes):
        assert (f"Of 3 ranks, {missing} did not begin" in seen[rank]["error"]) == came
        assert ("KVARENA_ENABLE=1" in seen[rank]["fix"]) == came


def test_one_of_four_hangs_and_the_others_wait_as_long_as_their_group_does_and_not_twice(
    four: Server,
) -> None:
    four.begin({"budget": [500_000] * 4, "hang": [False, True, False, False]})
    seen = four.seen(3)
    assert sorted(seen) == [0, 2, 3]
    four.inboxes[1].put("go on")
    seen |= four.seen(1)
    for each in seen.values():
        assert at_the_sink(each)
        assert each["kind"] == "KvArenaError"
        assert each["exchanges"] == 2


def test_one_of_four_dies_and_the_others_are_at_their_sinks_with_an_error(four: Server) -> None:
    agreed = four.run({"budget": [500_000, 400_000, 300_001, 600_000]})
    assert agreed == [agreed[0]] * 4
    assert 290_000 < agreed[0]["total"] <= 300_001
    four.begin({"budget": [500_000] * 4, "fail": ["", "", "", "die"]})
    seen = four.seen(3)
    assert sorted(seen) == [0, 1, 2]
    for each in seen.values():
        assert at_the_sink(each)
        assert each["kind"] == "KvArenaError"
        assert "the other 3 ranks cannot be heard" in each["error"]
