"""A pair whose pools grow and give back between any two steps, while it serves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvarena.plugin.engines.embedded import control, prefill
from kvarena.plugin.engines.embedded.config import EngineConfig
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.transfer import Capabilities, RecordingEngine, TransferEngine
from kvarena.transfer.testing import FailingEngine

if TYPE_CHECKING:
    from conftest import Pair  # type: ignore[import-not-found]

MakeEngine = Callable[..., Engine]
MakePair = Callable[[Engine, Engine], "Pair"]
STEP = 128 << 10
BASE = 384 << 10


def _slow() -> RecordingEngine:
    """Its regions can only be replaced, and not under traffic."""
    return RecordingEngine(capabilities=Capabilities(crosses_seams=False, spans_handles=True))


@pytest.fixture
def make_elastic(make_engine: MakeEngine, small: EngineConfig) -> Callable[..., Engine]:
    """Engines whose pools have room to grow."""

    def make(transfer: TransferEngine | None = None) -> Engine:
        return make_engine(small.evolve(reserved_bytes=2 << 20), transfer=transfer, pool_bytes=BASE)

    return make


def _ask(pair: Pair, role: str, change: control.Grow | control.Shrink) -> control.Resized:
    """Ask one side for a change, and turn until it has answered."""
    count = len(_resized(pair, role))
    (pair.prefill if role == "prefill" else pair.decode).elastic.ask(change)
    pair.turn_until(lambda: len(_resized(pair, role)) > count)
    return _resized(pair, role)[-1]


def _resized(pair: Pair, role: str) -> list[control.Resized]:
    return [message for message in pair.said[role] if isinstance(message, control.Resized)]


def _many(texts: list[Request], rounds: int) -> list[Request]:
    return [
        Request(rid=round_ * 100 + text.rid, tokens=text.tokens, max_new_tokens=text.max_new_tokens)
        for round_ in range(rounds)
        for text in texts
    ]


@pytest.mark.parametrize("transfer", [RecordingEngine, _slow])
def test_tokens_are_right_through_many_changes(
    make_elastic: Callable[..., Engine],
    make_pair: MakePair,
    generate: Callable[..., dict[int, Result]],
    texts: list[Request],
    transfer: Callable[[], RecordingEngine],
) -> None:
    pair = make_pair(make_elastic(transfer()), make_elastic(transfer()))
    before = {role: engine.report()["capacities"] for role, engine in pair.engines.items()}
    pair.connect()
    requests = _many(texts, 3)
    for request in requests:
        pair.decode.submit(request)
    changes = [control.Grow(STEP), control.Grow(STEP), control.Shrink(), control.Shrink()] * 3
    asked = {"prefill": 0, "decode": 0}
    while len(pair.results) < len(requests):
        for role, server in (("prefill", pair.prefill), ("decode", pair.decode)):
            if asked[role] < len(changes) and len(_resized(pair, role)) == asked[role]:
                server.elastic.ask(changes[asked[role]])
                asked[role] += 1
        for _ in range(5):
            pair.turn()
    pair.turn_until(lambda: not pair.prefill.busy and not pair.decode.busy)

    right = generate(texts)
    assert {rid: r.tokens for rid, r in pair.results.items()} == {
        request.rid: right[request.rid % 100].tokens for request in requests
    }
    for role, engine in pair.engines.items():
        made = _resized(pair, role)
        assert [resized.error for resized in made] == [""] * len(changes), role
        # Recorded transfers end at once: only leases stay out.
        assert role == "prefill" or transfer is _slow or sum(resized.in_flight for resized in made) > 0
        report = engine.report()
        assert report["problems"] == []
        assert report["capacities"] == before[role]
        assert report["growth"]["grown"] == report["growth"]["shrunk"] == len(changes) // 2
        assert report["transfers"]["recording"]["failed"] == 0
    # Some had to wait: pages that a peer was writing to lay in the tail.
    assert pair.engines["decode"].report()["growth"]["waited"] > 0


def test_what_was_leased_before_the_change_arrives_after_it(
    make_elastic: Callable[..., Engine],
    make_pair: MakePair,
    generate: Callable[..., dict[int, Result]],
    texts: list[Request],
) -> None:
    pair = make_pair(make_elastic(), make_elastic())
    pair.connect()
    for request in texts[-2:]:
        pair.decode.submit(request)
    pair.decode.step()
    granted = pair.decode.leases.active
    assert len(granted) == 2
    resized = _ask(pair, "decode", control.Grow(STEP))
    assert resized.in_flight == 2
    assert all(lease.epoch < pair.engines["decode"].ledger.epoch for lease in granted)
    pair.turn_until(lambda: len(pair.results) == 2)
    right = generate(texts[-2:])
    assert {rid: r.tokens for rid, r in pair.results.items()} == {rid: r.tokens for rid, r in right.items()}


def test_pages_in_flight_in_the_tail_hold_a_give_back_up(
    make_elastic: Callable[..., Engine], make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_elastic(), make_elastic())
    pair.connect()
    assert _ask(pair, "decode", control.Grow(STEP)).error == ""
    decode = pair.engines["decode"]
    large = decode.pool.total_bytes
    pair.decode.submit(texts[-1])
    pair.decode.step()
    assert pair.decode.leases.active

    # Nobody ends the lease, for the other side does not turn.
    pair.decode.elastic.ask(control.Shrink(limit_s=0.0))
    pair.decode.step()
    refused = _resized(pair, "decode")[-1]
    assert "Leases on the tail did not drain" in refused.error
    assert decode.pool.total_bytes == refused.total_bytes == large
    assert decode.ledger.registered_bytes == large
    assert not pair.decode.elastic.holding

    # While it waits, nothing new is leased; what is out ends, and then the memory goes.
    pair.decode.elastic.ask(control.Shrink(limit_s=60.0))
    pair.decode.step()
    assert pair.decode.elastic.holding
    pair.decode.submit(texts[2])
    pair.decode.step()
    assert [lease.request for lease in pair.decode.leases.active] == [str(texts[-1].rid)]
    pair.turn_until(lambda: len(pair.results) == 2)
    made = _resized(pair, "decode")[-1]
    assert made.error == ""
    assert made.tries > 2
    assert decode.pool.total_bytes == decode.ledger.registered_bytes == large - STEP
    assert all(result.reason != "error" for result in pair.results.values())


def test_what_was_promised_is_not_given_back(
    make_elastic: Callable[..., Engine], make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_elastic(), make_elastic())
    pair.connect()
    assert _ask(pair, "decode", control.Grow(STEP)).error == ""
    decode = pair.engines["decode"]
    # As if the running sequences could still grow to all that there is.
    decode.book._committed = decode.book.usable_bytes
    refused = _ask(pair, "decode", control.Shrink(limit_s=0.0))
    assert "were promised more than" in refused.error
    decode.book._committed = 0
    assert _ask(pair, "decode", control.Shrink(limit_s=0.0)).error == ""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_changes_that_cannot_be(make_elastic: Callable[..., Engine], make_pair: MakePair, role: str) -> None:
    pair = make_pair(make_elastic(), make_elastic())
    pair.connect()
    engine = pair.engines[role]
    before = engine.report()["capacities"], engine.ledger.regions
    for change, said in (
        (control.Shrink(), "nothing to give back"),
        (control.Grow(1 << 30), "more than the"),
        (control.Grow(0), "cannot grow to"),
        (control.Grow(-STEP), "cannot grow to"),
        # Reserved, but beyond the memory limit of 1 MiB.
        (control.Grow(1 << 20), "free"),
    ):
        resized = _ask(pair, role, change)
        assert said in resized.error, change
        assert (engine.report()["capacities"], engine.ledger.regions) == before, change
    assert engine.report()["growth"]["refused"] == 5
    assert engine.report()["problems"] == []


def test_an_announcement_that_cannot_be_followed_at_once(
    make_elastic: Callable[..., Engine],
    make_pair: MakePair,
    generate: Callable[..., dict[int, Result]],
    texts: list[Request],
) -> None:
    # The second and third connection fail: as when the network is away at the moment of growth.
    failing = FailingEngine(RecordingEngine(), fail_at=(2, 3), ops=("connect",))
    pair = make_pair(make_elastic(failing), make_elastic())
    pair.connect()
    assert _ask(pair, "decode", control.Grow(STEP)).error == ""
    served = pair.serve(texts)
    right = generate(texts)
    assert {rid: r.tokens for rid, r in served.items()} == {rid: r.tokens for rid, r in right.items()}
    assert failing.count == 4
    assert pair.prefill.refused == ""


def test_an_announcement_that_can_never_be_followed(
    make_elastic: Callable[..., Engine],
    make_pair: MakePair,
    texts: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = FailingEngine(RecordingEngine(), fail_at=range(2, 200_000), ops=("connect",))
    pair = make_pair(make_elastic(failing), make_elastic())
    pair.connect()
    assert _ask(pair, "decode", control.Grow(STEP)).error == ""
    pair.decode.submit(texts[3])
    # The same timeout says when a silent peer is lost: that is not what is tried here.
    monkeypatch.setattr(prefill, "silence_limit", lambda _timeout: math.inf)
    pair.hurry("prefill", 0.5)
    pair.turn_until(lambda: bool(pair.prefill.refused))
    assert "INJECTED" in pair.prefill.refused
    pair.turn_until(lambda: pair.heard("decode", control.Refused))
    # What it had been given is answered, and what comes next waits for another worker.
    assert "serves no longer" in pair.results[texts[3].rid].error
    pair.decode.submit(texts[4])
    pair.decode.step()
    assert texts[4].rid not in pair.results
