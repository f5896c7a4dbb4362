"""Prefill and decode servers over a transfer engine: tokens, pins, and every way in which it goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.config import EngineConfig
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.peers import PeerLost
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.transfer import RecordingEngine
from kvarena.transfer.testing import FailingEngine

if TYPE_CHECKING:
    from conftest import Pair  # type: ignore[import-not-found]

MakeEngine = Callable[..., Engine]
MakePair = Callable[[Engine, Engine], "Pair"]
TIMEOUT_S = 1.0


def _turn_alone(step: Callable[[], None]) -> None:
    end = time.monotonic() + 20 * TIMEOUT_S
    while time.monotonic() < end:
        step()


def _submitted(engine: RecordingEngine) -> list[object]:
    return [call for call in engine.calls if call.op == "submit"]


def test_tokens_equal_a_single_process(
    make_engine: MakeEngine,
    make_pair: MakePair,
    generate: Callable[..., dict[int, Result]],
    texts: list[Request],
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    served = pair.serve(texts)

    right = generate(texts)
    assert {rid: r.tokens for rid, r in served.items()} == {rid: r.tokens for rid, r in right.items()}
    assert pair.decode.batch.widest > 1
    pair.turn_until(lambda: not pair.prefill.busy)
    for engine in pair.engines.values():
        assert engine.report()["problems"] == []


def test_compaction_while_pages_are_in_flight(
    make_engine: MakeEngine,
    make_pair: MakePair,
    generate: Callable[..., dict[int, Result]],
    texts: list[Request],
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    for request in texts:
        pair.decode.submit(request)
    while len(pair.results) < len(texts):
        pair.turn()
        for engine in pair.engines.values():
            engine.allocator.compact()

    right = generate(texts)
    assert {rid: r.tokens for rid, r in pair.results.items()} == {rid: r.tokens for rid, r in right.items()}
    assert sum(engine.report()["moved_pages"] for engine in pair.engines.values()) > 0
    assert pair.leaks() == []


@pytest.mark.parametrize(
    ("model", "config", "named"),
    [
        # O3: dtype alone differs, and with it the bytes of a page.
        ({"kv_dtype": "bfloat16"}, {}, ["dtype", "float32", "bfloat16", "page_bytes", "1024", "512"]),
        ({"layer_num": 6}, {}, ["layers", "page_bytes", "1024", "1536"]),
        ({}, {"page_size": 8}, ["page_size", "4", "8"]),
        ({"window": 16}, {}, ["window", "12", "16"]),
        ({"seed": 7}, {}, ["seed", "0", "7"]),
    ],
)
def test_a_manifest_that_differs_is_refused_and_a_third_peer_still_connects(
    make_engine: MakeEngine,
    make_pair: MakePair,
    change_model: Callable[..., EngineConfig],
    small: EngineConfig,
    texts: list[Request],
    model: dict[str, object],
    config: dict[str, object],
    named: list[str],
) -> None:
    transfer = {"prefill": RecordingEngine(), "decode": RecordingEngine()}
    other = change_model(small, **model).evolve(**config)
    pair = make_pair(
        make_engine(other, transfer=transfer["prefill"]), make_engine(transfer=transfer["decode"])
    )
    pair.turn_until(lambda: pair.heard("prefill", control.Refused))

    said = next(m for m in pair.said["prefill"] if isinstance(m, control.Refused)).what
    for word in named:
        assert word in said
    assert pair.heard("decode", control.Refused)
    assert pair.prefill.refused
    # Requests wait for a prefill worker that fits; both servers go on turning.
    pair.decode.submit(texts[0])
    for _ in range(20):
        pair.turn()
    assert not pair.results
    assert not _submitted(transfer["prefill"])

    pair.prefill.close()
    third = make_pair(make_engine(), pair.engines["decode"]).prefill
    third.connect(pair.decode.hub.address)
    end = time.monotonic() + 20
    while not pair.results and time.monotonic() < end:
        third.step()
        pair.decode.step()
    assert pair.results[0].tokens


def test_another_transfer_engine_is_refused(make_engine: MakeEngine, make_pair: MakePair) -> None:
    pair = make_pair(make_engine(), make_engine(transfer=RecordingEngine("other")))
    pair.turn_until(lambda: pair.heard("prefill", control.Refused))
    assert "'recording'" in pair.prefill.refused
    assert "'other'" in pair.prefill.refused


def test_a_failed_submission_is_told_at_once(
    make_engine: MakeEngine, make_pair: MakePair, small: EngineConfig, texts: list[Request]
) -> None:
    # O11: the second of three batches cannot be submitted.
    failing = FailingEngine(RecordingEngine(), fail_at=2, ops=("submit",))
    config = small.evolve(transfer_pages=6)
    pair = make_pair(make_engine(config, transfer=failing, timeout=100), make_engine(config, timeout=100))
    pair.connect()
    failed, later = texts[5], texts[3]
    pair.decode.submit(failed)
    pair.turn_until(lambda: failing.count == 2)
    # Within less than any timeout: those are of 100 seconds.
    pair.turn_until(lambda: failed.rid in pair.results, limit=60)
    assert pair.results[failed.rid].reason == "error"
    assert "INJECTED" in pair.results[failed.rid].error
    assert pair.results[failed.rid].tokens == []
    assert pair.leaks() == []
    assert pair.decode.leases.active == ()
    # The pair goes on.
    assert pair.serve([later])[later.rid].tokens


def test_a_prompt_longer_than_the_pool(
    make_engine: MakeEngine, make_pair: MakePair, small: EngineConfig
) -> None:
    # O14, with a decode pool of exactly 64 tokens.
    config = small.evolve(context_length=256, chunk_pages=2)
    full, window = config.page_bytes()
    sink = max(full, window)
    room = 16 * full + (config.window_pages + config.chunk_pages) * window
    decode = make_engine(config.evolve(reserved_bytes=sink + room))
    assert decode.book.capacity_tokens() == 64
    pair = make_pair(make_engine(config), decode)
    pair.connect()
    pair.serve([Request(0, [65] * 65, 4), Request(1, [66] * 64, 4), Request(2, [67] * 60, 4)])

    assert pair.results[0].reason == "error"
    assert pair.results[0].tokens == []
    assert "65 tokens" in pair.results[0].error
    assert "64" in pair.results[0].error
    # What the pool holds is served as far as it goes.
    assert pair.results[1].reason == "length"
    assert len(pair.results[1].tokens) == 1
    assert len(pair.results[2].tokens) == 4
    pair.turn_until(lambda: not pair.prefill.busy)
    assert pair.leaks() == []


def test_a_prompt_longer_than_the_prefill_pool(
    make_engine: MakeEngine, make_pair: MakePair, small: EngineConfig, texts: list[Request]
) -> None:
    # O14: prefill aborts, and decode is told.
    config = small.evolve(context_length=256, chunk_pages=2)
    full, window = config.page_bytes()
    room = 16 * full + (config.window_pages + config.chunk_pages) * window
    prefill = make_engine(config.evolve(reserved_bytes=max(full, window) + room))
    pair = make_pair(prefill, make_engine(config))
    pair.connect()
    pair.serve([Request(0, [65] * 65, 4), texts[3]])

    assert pair.results[0].reason == "error"
    assert pair.results[0].tokens == []
    assert "65 tokens" in pair.results[0].error
    assert len(pair.results[3].tokens) == 10
    pair.turn_until(lambda: not pair.prefill.busy)
    assert pair.leaks() == []


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16])
def test_cancel_at_any_moment(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request], turns: int
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    victim, other = texts[-1], texts[2]
    pair.decode.submit(victim)
    pair.decode.submit(other)
    for _ in range(turns):
        pair.turn()
    pair.decode.cancel(victim.rid)
    pair.turn_until(lambda: victim.rid in pair.results and other.rid in pair.results)
    pair.turn_until(lambda: not pair.prefill.busy)

    assert pair.results[other.rid].reason in ("length", "eos")
    assert pair.results[victim.rid].reason in ("error", "length", "eos")
    assert pair.leaks() == []
    assert pair.decode.leases.active == ()


def test_requests_that_make_no_sense(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    for request in (
        Request(90, [], 4),
        Request(91, [256], 0),
        Request(92, [256, -1], 4),
        Request(93, [259], 4),
    ):
        pair.decode.submit(request)
        assert pair.results[request.rid].reason == "error"
    pair.decode.cancel(1234)
    assert pair.leaks() == []


def test_decode_survives_a_prefill_worker_that_falls_silent(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    pair.serve(texts[2:3])
    pair.decode.submit(texts[-1])
    pair.decode.submit(texts[-2])
    pair.decode.step()
    pair.hurry("decode", TIMEOUT_S)
    with pytest.raises(PeerLost, match="no word"):
        _turn_alone(pair.decode.step)

    for request in texts[-2:]:
        assert pair.results[request.rid].reason == "error"
        assert "lost" in pair.results[request.rid].error
    assert pair.engines["decode"].book.leaks() == []
    assert pair.decode.leases.active == ()
    # Nobody is served any more, and is told so.
    pair.decode.submit(Request(77, [256, 65], 2))
    assert pair.results[77].reason == "error"


def test_a_decode_worker_that_is_stopped_still_says_whom_it_has_lost(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    pair.decode.submit(Request(50, texts[1].tokens, 40))
    pair.turn_until(lambda: bool(pair.decode.batch))
    pair.decode.stop()

    # What a lease that cannot be sent does; a step raises only when all that has arrived is decoded.
    pair.decode._lose(pair.decode._peers[0], "it has closed its connection")
    assert pair.decode.batch
    with pytest.raises(PeerLost, match="a prefill worker is lost"):
        pair.decode.stop()


def test_prefill_survives_a_decode_worker_that_falls_silent(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    for request in texts:
        pair.decode.submit(request)
    pair.turn()
    pair.turn()
    pair.hurry("prefill", TIMEOUT_S)
    with pytest.raises(PeerLost, match="no word"):
        _turn_alone(pair.prefill.step)
    assert pair.engines["prefill"].book.leaks() == []


class _Slow(RecordingEngine):
    """Takes transfers, and ends them when the test says so."""

    ended = False

    def submit(self, *args: object) -> _Slow:  # type: ignore[override]
        return self

    def done(self) -> bool:
        return self.ended

    def wait(self, timeout: float | None = None) -> None:
        raise AssertionError("nothing may block on a transfer")


def test_pages_of_a_transfer_that_does_not_end_are_given_to_nobody(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    slow = _Slow()
    pair = make_pair(make_engine(transfer=slow), make_engine())
    pair.connect()
    pair.prefill._outbox._timeout = TIMEOUT_S
    pair.decode.submit(texts[3])
    with pytest.raises(PeerLost, match="did not end within 1 s"):
        pair.turn_until(lambda: False, limit=20 * TIMEOUT_S)

    assert pair.results[3].reason == "error"
    assert pair.results[3].tokens == []
    assert pair.engines["decode"].book.leaks() == []
    # The transfer may still read its source: those pages stay pinned, even when all work is dropped.
    book, gate = pair.engines["prefill"].book, pair.engines["prefill"].ledger.gate
    assert book.leaks() != []
    assert gate.in_flight == 2  # one for each sub-pool
    slow.ended = True
    pair.prefill.step()
    assert book.leaks() == []
    assert gate.in_flight == 0


def test_pages_that_a_transfer_still_reads_stay_pinned_after_the_peer_is_gone(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    slow = _Slow()
    pair = make_pair(make_engine(transfer=slow), make_engine())
    pair.connect()
    pair.decode.submit(texts[3])
    pair.turn_until(lambda: bool(pair.prefill._outbox))
    pair.decode.hub.close()
    with pytest.raises(PeerLost, match="closed its connection"):
        _turn_alone(pair.prefill.step)
    book = pair.engines["prefill"].book
    assert book.leaks() != []
    slow.ended = True
    pair.prefill._outbox.release_ended()
    assert book.leaks() == []
