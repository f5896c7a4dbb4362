"""A pair whose pools grow and give back between any two steps, while it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.config import EngineConfig
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.transfer import Capabilities, RecordingEngine

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

    def make(transfer: RecordingEngine | None = None) -> Engine:
        return make_engine(small.evolve(reserved_bytes=1 << 20), transfer=transfer, pool_bytes=BASE)

    return make


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
    changes = [control.Grow(STEP), control.Grow(STEP), control.GiveBack(), control.GiveBack()] * 3
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
        assert report["growth"]["grown"] == report["growth"]["given_back"] == len(changes) // 2
        assert report["transfers"]["recording"]["failed"] == 0
    # Some had to wait: pages that a peer was writing to lay in the tail.
    assert pair.engines["decode"].report()["growth"]["waited"] > 0
