"""Peers that die, hang, stop or cancel: each costs its own requests, and nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from kvarena.plugin.engines.embedded import clock as clock_module
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.clock import AwakeClock
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.peers import PeerLost
from kvarena.plugin.engines.embedded.prefill import PrefillServer
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.transfer import RecordingEngine

if TYPE_CHECKING:
    from conftest import Pair  # type: ignore[import-not-found]

MakeEngine = Callable[..., Engine]
MakePair = Callable[[Engine, Engine], "Pair"]


class _SlowToConnect(RecordingEngine):
    """Its peer says nothing until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = threading.Event()
        self.silent.set()
        self.asked = 0

    def connect(self, description: bytes) -> str:
        self.asked += 1
        while self.silent.is_set():
            time.sleep(0.005)
        return super().connect(description)


def _turn(pair: Pair, others: list[PrefillServer], until: Callable[[], bool], limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not until():
        assert time.monotonic() < end, "it did not happen"
        pair.decode.step()
        for other in others:
            other.step()


def test_of_two_prefill_workers_the_death_of_one_costs_only_its_requests(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    other = PrefillServer(make_engine(), lambda message: None)
    other.connect(pair.decode.hub.address)
    pair.connect()
    _turn(pair, [pair.prefill, other], lambda: len(pair.decode._peers) == 2)
    for request in texts[:4]:
        pair.decode.submit(request)
    pair.decode.step()
    assert len(pair.decode.leases.active) == 4
    # As the kernel does for a process that is killed.
    other.link.close()  # type: ignore[union-attr]
    other.link = None
    _turn(pair, [pair.prefill], lambda: len(pair.results) == 4, limit=30.0)
    failed = [rid for rid, result in pair.results.items() if result.reason == "error"]
    assert len(failed) == 2
    assert all("closed its connection" in pair.results[rid].error for rid in failed)
    assert pair.serve(texts[5:6])[texts[5].rid].tokens
    other.close()


def test_a_prefill_worker_that_falls_silent_ends_itself_only(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    silent = PrefillServer(make_engine(), lambda message: None)
    silent.connect(pair.decode.hub.address)
    pair.connect()
    _turn(pair, [pair.prefill, silent], lambda: len(pair.decode._peers) == 2)
    pair.hurry("decode", 1.0)
    _turn(pair, [pair.prefill], lambda: len(pair.decode._peers) == 1, limit=20.0)
    served = pair.serve(texts[:4])
    assert all(result.reason != "error" for result in served.values())
    silent.close()


def test_a_decode_worker_that_is_killed_is_noticed_by_its_closed_connection(
    make_engine: MakeEngine, make_pair: MakePair
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    pair.decode.hub.close()
    began = time.monotonic()

    def step() -> None:
        while time.monotonic() < began + 20:  # a silent one is lost after 45 s
            pair.prefill.step()

    with pytest.raises(PeerLost, match="closed its connection"):
        step()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_worker_that_is_told_to_end_is_not_a_lost_one(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request], first: str
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    pair.serve(texts[:1])
    server, other = (pair.prefill, pair.decode) if first == "prefill" else (pair.decode, pair.prefill)
    server.stop()
    server.close()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        other.step()
    assert pair.leaks() == []


def test_a_cancel_wins_though_the_pages_have_arrived(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    pair.decode.submit(texts[3])
    pair.decode.step()
    # `PrefillDone` is in the socket, and not yet read.
    done = len(pair.said["prefill"]) + 1
    while len(pair.said["prefill"]) < done:
        pair.prefill.step()
    time.sleep(0.2)
    pair.decode.cancel(texts[3].rid)
    assert pair.results[texts[3].rid].reason == "error"
    assert "cancelled" in pair.results[texts[3].rid].error
    pair.turn_until(lambda: not pair.decode.leases.active)
    for _ in range(20):
        pair.turn()
    assert pair.decode.batch.steps == 0
    assert pair.leaks() == []


def test_a_worker_that_never_answers_an_abort_is_lost(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    pair.decode.submit(texts[3])
    pair.decode.step()
    pair.decode.cancel(texts[3].rid)
    pair.hurry("decode", 0.2)

    def answer_pings_only() -> None:
        for _ in range(10_000):
            pair.prefill.link.send(control.Ping())
            pair.decode.step()
            time.sleep(0.005)

    with pytest.raises(PeerLost, match="abort"):
        answer_pings_only()
    assert pair.engines["decode"].book.leaks() == []


def test_a_silent_peer_at_connect_does_not_block_the_server(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    slow = _SlowToConnect()
    pair = make_pair(make_engine(transfer=slow), make_engine())
    try:
        longest, end = 0.0, time.monotonic() + 1.5
        while time.monotonic() < end:
            began = time.monotonic()
            pair.prefill.step()
            longest = max(longest, time.monotonic() - began)
            pair.decode.step()
        assert slow.asked == 1
        assert longest < 1.0
        assert not pair.heard("prefill", control.Connected)
    finally:
        slow.silent.clear()
    pair.connect()
    assert pair.serve(texts[:1])[texts[0].rid].tokens


def test_a_peer_that_stays_silent_at_connect_is_refused_within_the_timeout(
    make_engine: MakeEngine, make_pair: MakePair
) -> None:
    slow = _SlowToConnect()
    pair = make_pair(make_engine(transfer=slow), make_engine())
    try:
        pair.turn_until(lambda: slow.asked == 1)
        pair.prefill._connection._timeout = lambda: 0.3
        for _ in range(4000):
            pair.prefill.step()
            pair.decode.step()
            if pair.prefill.refused:
                break
            time.sleep(0.001)
        assert "no connection within 0.3 s" in pair.prefill.refused
    finally:
        slow.silent.clear()
    # The attempt ends later, and is disconnected again.
    end = time.monotonic() + 10
    while not any(call.op == "disconnect" for call in slow.calls):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_time_in_which_the_process_did_not_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = AwakeClock(max_step=2.0)
    for _ in range(10):
        now[0] += 0.5
        clock.tick()
    assert clock.now() == 5.0
    now[0] += 3600.0
    assert clock.tick() == 7.0


def test_a_pair_that_is_paused_together_goes_on(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: now[0] + time.monotonic()))
    pair = make_pair(make_engine(timeout=10.0), make_engine(timeout=10.0))
    pair.connect()
    for request in texts:
        pair.decode.submit(request)
    pair.turn()
    now[0] += 9.0
    # Whichever wakes first finds nothing from the other.
    pair.decode.step()
    pair.prefill.step()
    pair.turn_until(lambda: len(pair.results) == len(texts))
    assert all(result.reason != "error" for result in pair.results.values())
