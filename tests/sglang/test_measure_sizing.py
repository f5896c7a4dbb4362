"""What is decided from measured steps: the limit yields before the tokens, on all ranks. Needs no SGLang."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.sglang.measure import run as run_module
from kvarena.plugin.engines.sglang.measure.errors import MeasureError
from kvarena.plugin.engines.sglang.measure.later import later_allocations
from kvarena.plugin.engines.sglang.measure.run import measure
from kvarena.plugin.engines.sglang.measure.server import MeasuredServer
from kvarena.plugin.engines.sglang.measure.sizing import PoolSizing, size_pool
from kvarena.plugin.engines.sglang.measure.steps import StepShape, Workload, fixed_steps, steps_at
from kvarena.plugin.ranks import Alone, RankReport

GIB = 1 << 30
FLOOR = 1536 * (1 << 20) + (GIB >> 3)
#: One H200 with the gpt-oss shape: what unmodified 0.5.23 gave the pool, and what it left free.
UNMODIFIED, LEFT = 128 * GIB, 10 * GIB

Cost = Callable[[StepShape], int]


def cost_of(shape: StepShape) -> int:
    """2.3 MiB a running request, and a prefill of 1.2 GiB."""
    return GIB * 6 // 5 if not shape.requests else shape.requests * 2_400_000


class FakeMeter:
    """Says what the step that ran last cost."""

    def __init__(self) -> None:
        self.nbytes = self.began = 0

    def begin(self) -> None:
        self.began += 1

    def peak_bytes(self) -> int:
        return self.nbytes

    def unseen_bytes(self) -> int:
        return 0


class Card:
    """A server of one rank."""

    def __init__(
        self,
        *,
        limit: int = 4096,
        given: bool = False,
        cost: Cost = cost_of,
        ranks: Any = None,
        fail_at: int | None = None,
        role: str = "null",
        left: int = LEFT,
        settings: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.ran: list[StepShape] = []
        self.meter = FakeMeter()
        self._cost, self._fail_at = cost, fail_at
        graphs = SimpleNamespace(backend="full", max_bs=256)
        fields: dict[str, Any] = {
            "mem_fraction_static": None,
            "max_running_requests": limit if given else None,
            "disaggregation_mode": role,
            "chunked_prefill_size": 8192,
            "max_prefill_tokens": 16384,
            "tp_size": 1,
            "pp_size": 1,
            "cuda_graph_config": SimpleNamespace(decode=graphs),
        }
        self.runner = SimpleNamespace(
            device="cpu",
            gpu_id=0,
            max_running_requests=limit,
            max_total_num_tokens=6_500_000,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            model_config=SimpleNamespace(context_len=131_072, vocab_size=201_088, hf_config="gpt-oss"),
            card=self,
        )
        self.server = MeasuredServer(
            runner=self.runner,
            server_args=SimpleNamespace(**(fields | (arguments or {}))),
            settings=Settings(enable=True, **(settings or {})),
            ranks=ranks or Alone(),
            unmodified_bytes=UNMODIFIED,
            backed_bytes=GIB,
            free_bytes=UNMODIFIED + left - GIB,
            page_bytes=22_000,
            page_size=1,
            bytes_per_token=22_000.0,
            meter=self.meter,
        )

    def step(self, shape: StepShape, begin: Callable[[], None]) -> None:
        begin()
        if len(self.ran) == self._fail_at:
            raise RuntimeError("CUDA out of memory")
        self.ran.append(shape)
        # The first run of a step also compiles: more, and it does not count.
        first = sum(other == shape for other in self.ran) % 2
        self.meter.nbytes = self._cost(shape) + (5 * GIB if first else 0)

    def size(self) -> PoolSizing:
        return size_pool(self.server)


@pytest.fixture(autouse=True)
def _steps_cost_what_the_card_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "run_step", lambda runner, shape, begin: runner.card.step(shape, begin))


class Together:
    """Ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=20)
        self._said: list[RankReport | None] = [None] * count

    def rank(self, index: int) -> Any:
        def exchange(mine: RankReport) -> list[RankReport]:
            self._said[index] = mine
            self._barrier.wait()
            said = [each for each in self._said if each is not None]
            self._barrier.wait()
            return said

        return SimpleNamespace(count=self.count, exchange=exchange)


def on_all(cards: list[Card]) -> list[PoolSizing]:
    found: list[Any] = [None] * len(cards)

    def one(index: int) -> None:
        found[index] = cards[index].size()

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(cards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert None not in found
    return found


@pytest.mark.parametrize("limit", [32, 256])
def test_what_graphs_cover_leaves_only_what_was_measured(limit: int) -> None:
    card = Card(limit=limit)
    found = card.size()
    reserve = max(FLOOR, cost_of(StepShape("prefill", "extend", 1)) * 3 // 2)
    assert found.pool_bytes == UNMODIFIED + LEFT - reserve
    assert found.max_requests is None
    assert not any(shape.kind == "decode" for shape in card.ran)


@pytest.mark.parametrize("limit", [2048, 4096])
def test_the_limit_yields_where_its_steps_do_not_fit_beside_the_unmodified_size(limit: int) -> None:
    expensive: Cost = lambda shape: cost_of(shape) * 3  # noqa: E731
    found = Card(limit=limit, cost=expensive).size()
    assert found.pool_bytes >= UNMODIFIED
    largest = LEFT * 2 // 3 // 7_200_000
    assert found.max_requests is not None
    assert abs(found.max_requests - largest) <= 1
    assert f"max_running_requests {limit} -> {found.max_requests}" in found.line


def test_the_limit_that_yields_is_measured_itself() -> None:
    """Steps that grow faster at first: a straight line between two figures would promise too much."""
    steep: Cost = lambda shape: min(shape.requests, 1000) * 9_000_000 if shape.requests else GIB  # noqa: E731
    card = Card(cost=steep)
    found = card.size()
    assert found.max_requests is not None
    assert any(shape.requests == found.max_requests for shape in card.ran)
    assert steep(StepShape("decode", "decode", 1, requests=found.max_requests)) * 3 // 2 <= LEFT


def test_an_explicit_limit_is_kept_and_the_tokens_yield_with_the_figures() -> None:
    expensive: Cost = lambda shape: cost_of(shape) * 3  # noqa: E731
    found = Card(limit=4096, given=True, cost=expensive).size()
    assert found.max_requests is None
    assert (
        found.pool_bytes == UNMODIFIED + LEFT - expensive(StepShape("d", "decode", 1, requests=4096)) * 3 // 2
    )
    assert "--max-running-requests 4096 needs more" in found.line
    assert f"{found.pool_bytes / GIB:.2f} GiB" in found.line


def test_the_price_of_requests_beyond_the_graphs_is_told() -> None:
    found = Card(left=20 * GIB).size()
    assert found.price is not None
    extra = cost_of(StepShape("d", "decode", 1, requests=4096)) * 3 // 2 - GIB * 6 // 5 * 3 // 2
    assert abs(found.price.extra_bytes - extra) <= 2
    assert f"4096 running requests cost {extra / GIB:.1f} GiB beyond the graphs" in found.line
    assert "--max-running-requests 256 gives 582 000 more tokens" in found.line


def test_the_graphs_limit_can_be_asked_for() -> None:
    card = Card(settings={"max_running": "graphs"})
    found = card.size()
    assert found.max_requests == 256
    assert found.pool_bytes > UNMODIFIED
    assert all(shape.requests in (0, 256) for shape in card.ran)


def test_the_operators_own_limit_comes_before_the_graphs() -> None:
    assert Card(limit=512, given=True, settings={"max_running": "graphs"}).size().max_requests is None


def test_the_second_run_of_a_step_counts() -> None:
    card = Card()
    card.size()
    assert card.meter.began == len(card.ran)
    assert all(card.ran.count(shape) == 2 for shape in card.ran)


@pytest.mark.parametrize("index", range(22))
def test_a_step_that_fails_anywhere_leaves_the_unmodified_size_on_all_ranks(index: int) -> None:
    together = Together(2)
    cards = [Card(ranks=together.rank(0)), Card(ranks=together.rank(1), fail_at=index)]
    for found in on_all(cards):
        assert (found.pool_bytes, found.max_requests) == (UNMODIFIED, None)
        assert "rank 1: RuntimeError: CUDA out of memory" in found.line
    # Both ended at the same step.
    assert abs(len(cards[0].ran) - len(cards[1].ran)) <= 2


def test_the_failing_steps_are_all_there_are() -> None:
    card = Card()
    card.size()
    assert len(card.ran) == 22


def test_ranks_of_unequal_peaks_take_the_larger() -> None:
    together = Together(2)
    dear: Cost = lambda shape: cost_of(shape) * 3  # noqa: E731
    found = on_all([Card(ranks=together.rank(0)), Card(ranks=together.rank(1), cost=dear)])
    alone = Card(cost=dear).size()
    assert [each.pool_bytes for each in found] == [alone.pool_bytes] * 2
    assert [each.max_requests for each in found] == [alone.max_requests] * 2


def test_ranks_of_unequal_room_take_the_smaller() -> None:
    together = Together(2)
    found = on_all([Card(ranks=together.rank(0)), Card(ranks=together.rank(1), left=5 * GIB)])
    assert found[0].max_requests == found[1].max_requests == Card(left=5 * GIB).size().max_requests


def test_hosts_of_different_settings_end_at_one_limit() -> None:
    together = Together(2)
    found = on_all([
        Card(ranks=together.rank(0)),
        Card(ranks=together.rank(1), settings={"peak_margin": 3.0}),
    ])  # fmt: skip
    assert found[0].max_requests == found[1].max_requests
    assert found[0].max_requests is not None
    assert all(each.pool_bytes >= UNMODIFIED for each in found)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"mem_fraction_static": 0.5}, "--mem-fraction-static"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"attn_cp_size": 2}, "context parallelism"),
    ],
)
def test_what_cannot_be_measured_gets_the_unmodified_size_and_a_reason(
    arguments: dict[str, Any], why: str
) -> None:
    card = Card(arguments=arguments)
    found = card.size()
    assert (found.pool_bytes, found.max_requests, card.ran) == (UNMODIFIED, None, [])
    assert why in found.line


def test_arguments_that_cannot_be_read_are_a_reason_on_all_ranks() -> None:
    together = Together(2)
    cards = [Card(ranks=together.rank(0)), Card(ranks=together.rank(1))]
    del cards[1].runner.model_config.context_len
    for found in on_all(cards):
        assert found.pool_bytes == UNMODIFIED
        assert "context_len" in found.line


def test_speculation_is_refused() -> None:
    card = Card()
    card.runner.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    assert "--speculative-algorithm" in card.size().line


def test_no_free_memory_that_is_missing_makes_the_pool_larger_than_the_device() -> None:
    """Graphs may take more than unmodified SGLang keeps for them."""
    found = Card(left=-2 * GIB).size()
    assert found.pool_bytes == UNMODIFIED - 2 * GIB


def test_the_staging_ring_is_in_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    without = Card(role="decode", limit=256).size().pool_bytes
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    assert Card(role="decode", limit=256).size().pool_bytes == without - 4 * GIB


def test_later_allocations_by_role() -> None:
    staging = {"SGLANG_DISAGG_STAGING_BUFFER": "true", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "1024"}

    def of(role: str, environ: dict[str, str], **changes: Any) -> dict[str, int]:
        config = SimpleNamespace(disaggregation_mode=role, chunked_prefill_size=8192, max_prefill_tokens=1)
        given = {"chunk_bytes": 100, "mla": False, "vocabulary": 129_280} | changes
        return dict(later_allocations(config, environ=environ, **given))

    assert of("decode", staging) == {"staging ring": GIB}
    assert of("prefill", staging) == {"4 staging buffers": 400}
    assert of("decode", staging, mla=True) == of("null", staging) == of("decode", {}) == {}
    assert of("null", {}, input_logprobs=True) == {"input log-probabilities": 8 * 8192 * 129_280}
    assert of("decode", staging | {"SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "much"}) == {"staging ring": 4 * GIB}


def test_steps_by_role() -> None:
    work = Workload("null", 4096, 256, 8192, 131_072, 6_500_000)

    def names(role: str, requests: int = 4096) -> list[str]:
        found = dataclasses.replace(work, role=role)
        return [shape.name for shape in (*fixed_steps(found), *steps_at(found, requests))]

    prefill = ["prefill", "prefill behind a prefix", "prefill of many"]
    assert names("null") == [*prefill, "decode", "sampling with top-p"]
    assert names("null", 256) == [*prefill, "sampling with top-p"]
    assert names("prefill") == [*prefill, "sampling with top-p"]
    assert names("decode") == ["decode", "sampling with top-p"]
    mla = dataclasses.replace(work, mla=True, prefix_capacity=131_072)
    few = fixed_steps(mla)[-1]
    assert (few.name, few.batch, few.tokens + few.prefix) == ("few tokens behind a prefix", 1, 131_072)
    short = fixed_steps(dataclasses.replace(mla, context=32_768))[-1]
    assert (short.batch, short.tokens + short.prefix) == (4, 32_768)


def test_a_step_never_asks_for_more_than_the_pool_or_the_context() -> None:
    work = Workload("null", 4096, 256, 8192, 2048, 10_000)
    for shape in (*fixed_steps(work), *steps_at(work, 4096)):
        assert shape.tokens + shape.prefix <= work.context
        assert shape.longest <= work.context
    decode = next(shape for shape in steps_at(work, 4096) if shape.kind == "decode")
    assert decode.batch * (decode.prefix + 1) <= work.pool_tokens


def test_a_kept_measurement_is_taken_and_costs_no_step(tmp_path: Path) -> None:
    settings = {"profile_dir": str(tmp_path / "profiles")}
    first, second = Card(settings=settings), Card(settings=settings)
    measured, kept = first.size(), second.size()
    assert (kept.pool_bytes, kept.max_requests) == (measured.pool_bytes, measured.max_requests)
    # Only the limit that yields is not kept.
    assert {shape.requests for shape in second.ran} == {measured.max_requests}
    assert "reserve kept from an earlier start" in kept.line


def test_other_flags_are_measured_anew(tmp_path: Path) -> None:
    settings = {"profile_dir": str(tmp_path / "profiles")}
    Card(settings=settings).size()
    other = Card(settings=settings, arguments={"chunked_prefill_size": 4096})
    assert "reserve measured" in other.size().line


def test_a_kept_measurement_of_one_rank_alone_is_not_taken(tmp_path: Path) -> None:
    settings = {"profile_dir": str(tmp_path / "profiles")}
    Card(settings=settings).size()
    together = Together(2)
    found = on_all([Card(ranks=together.rank(0), settings=settings), Card(ranks=together.rank(1))])
    assert all("reserve measured" in each.line for each in found)


def test_a_kept_measurement_that_cannot_be_trusted_is_measured_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"profile_dir": str(tmp_path / "profiles")}
    Card(settings=settings).size()
    (path,) = (tmp_path / "profiles").iterdir()
    path.write_bytes(b"{")
    assert "reserve measured" in Card(settings=settings).size().line
    assert f"{path} is not used: it is cut off" in caplog.text
    assert "reserve kept" in Card(settings=settings).size().line


def test_a_rank_that_is_elsewhere_ends_the_measuring() -> None:
    card = Card()
    ranks = SimpleNamespace(count=2, exchange=lambda mine: [mine, RankReport("failed", failure="gone")])
    with pytest.raises(MeasureError, match="gone"):
        measure(card.runner, [StepShape("prefill", "extend", 1)], ranks=ranks, meter=card.meter)  # type: ignore[arg-type]
