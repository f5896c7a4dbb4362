"""The same-host engine in a pair: leased pages, and a receiver that believes only what it sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.transfer import LeasedPageEngine, LeaseError, PageBatch, RecordingEngine, TransferTimeout
from kvarena.transfer.testing.recording import FinishedTransfer

if TYPE_CHECKING:
    from conftest import Pair  # type: ignore[import-not-found]

MakeEngine = Callable[..., Engine]
MakePair = Callable[[Engine, Engine], "Pair"]


@pytest.fixture
def pair(make_engine: MakeEngine, make_pair: MakePair) -> Pair:
    pair = make_pair(make_engine(transfer="same-host"), make_engine(transfer="same-host"))
    pair.connect()
    return pair


def test_tokens_equal_a_single_process(
    pair: Pair, generate: Callable[..., dict[int, Result]], texts: list[Request]
) -> None:
    assert isinstance(pair.engines["prefill"].channel.leased, LeasedPageEngine)
    served = pair.serve(texts)
    right = generate(texts)
    assert {rid: r.tokens for rid, r in served.items()} == {rid: r.tokens for rid, r in right.items()}
    pair.turn_until(lambda: not pair.prefill.busy)
    for engine in pair.engines.values():
        assert engine.report()["problems"] == []
    assert pair.engines["prefill"].report()["transfers"]["same-host"]["failed"] == 0


def test_pages_that_nobody_wrote_are_not_decoded(
    pair: Pair, texts: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = pair.engines["prefill"].channel
    # A sender that says it has written, and has not.
    with monkeypatch.context() as patched:
        patched.setattr(pair.decode._arrivals, "_timeout", 0.5)
        patched.setattr(channel, "send", lambda *args, **kwargs: FinishedTransfer())
        pair.serve(texts[3:4])
    result = pair.results[texts[3].rid]
    assert result.reason == "error"
    assert "said to be written" in result.error
    assert result.tokens == []
    pair.turn_until(lambda: not pair.decode.leases.active)
    assert pair.leaks() == []
    # The pair goes on.
    assert pair.serve(texts[4:5])[texts[4].rid].tokens


def test_what_a_cancelled_request_leased_is_not_written_any_more(pair: Pair, texts: list[Request]) -> None:
    pair.decode.submit(texts[-1])
    pair.decode.step()
    lease = pair.decode.leases.active[0]
    peer = pair.prefill._connection.peer
    pair.decode.cancel(texts[-1].rid)
    pair.turn_until(lambda: texts[-1].rid in pair.results and not pair.decode.leases.active)
    assert pair.results[texts[-1].rid].reason == "error"
    assert pair.leaks() == []
    with pytest.raises(LeaseError, match="revoked"):
        pair.engines["prefill"].ledger.engine.submit_pages(
            peer, PageBatch(lease.pages["full"], lease.pages["full"], 1024, lease)
        )


def test_taking_a_lease_back_does_not_block_the_decode_loop(
    pair: Pair, texts: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As from a sender that has stopped; its pages are given to nobody until it is proven to have ended.
    channel, proven, asked = pair.engines["decode"].channel, threading.Event(), []

    def wait(lease: object, why: str) -> None:
        asked.append(lease)
        if len(asked) == 1:
            raise TransferTimeout("same-host", "peer", 1.0)
        proven.wait(60.0)

    monkeypatch.setattr(channel, "take_back", wait)
    pair.decode.submit(texts[-1])
    pair.decode.step()
    pair.decode.cancel(texts[-1].rid)
    longest, end = 0.0, time.monotonic() + 2.0
    while time.monotonic() < end:
        began = time.monotonic()
        pair.decode.step()
        longest = max(longest, time.monotonic() - began)
        pair.prefill.step()
    assert len(asked) == 2
    assert longest < 1.5
    assert pair.decode.leases.active != ()
    assert pair.engines["decode"].book.leaks() != []
    assert pair.serve(texts[2:3])[texts[2].rid].tokens
    proven.set()
    pair.turn_until(lambda: not pair.decode.leases.active)
    assert pair.leaks() == []


def test_an_engine_without_leased_pages_takes_the_senders_word(make_engine: MakeEngine) -> None:
    engine = make_engine(transfer=RecordingEngine())
    assert engine.channel.leased is None


def test_a_manifest_that_differs_is_refused_before_anything_is_mapped(
    make_engine: MakeEngine, make_pair: MakePair, change_model: Callable[..., object], small: object
) -> None:
    other = make_engine(change_model(small, layer_num=6), transfer="same-host")
    pair = make_pair(other, make_engine(transfer="same-host"))
    pair.turn_until(lambda: pair.heard("prefill", control.Refused))
    assert "layers" in pair.prefill.refused
    assert pair.engines["decode"].ledger.engine.attached == ()  # type: ignore[attr-defined]
