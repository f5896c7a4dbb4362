"""A transfer that breaks under way is written again, once the peer is heard, and not for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.transfer import Addresses, Pending, RecordingEngine, TransferFailed

if TYPE_CHECKING:
    from conftest import Pair  # type: ignore[import-not-found]

MakeEngine = Callable[..., Engine]
MakePair = Callable[[Engine, Engine], "Pair"]


class _Broken:
    """A transfer that was submitted, and ends badly."""

    def done(self) -> bool:
        raise TransferFailed("recording", "peer", "LOST", "the connection is lost")

    def wait(self, timeout: float | None = None) -> None:
        self.done()


class _Breaks(RecordingEngine):
    """Breaks the transfers of these numbers, counted from 1, without writing anything."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.count = 0

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Pending:
        self.count += 1
        if self.count in self.numbers:
            return _Broken()
        return super().submit(peer, src, dst, lengths)


@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2), (1, 4)])
def test_it_is_written_again(
    make_engine: MakeEngine,
    make_pair: MakePair,
    generate: Callable[..., dict[int, Result]],
    texts: list[Request],
    numbers: tuple[int, ...],
) -> None:
    pair = make_pair(make_engine(transfer=_Breaks(*numbers)), make_engine())
    pair.connect()
    served = pair.serve(texts[-2:])
    right = generate(texts[-2:])
    assert {rid: r.tokens for rid, r in served.items()} == {rid: r.tokens for rid, r in right.items()}
    pair.turn_until(lambda: not pair.prefill.busy)
    assert pair.engines["prefill"].report()["resent"] in (1, 2)
    assert pair.leaks() == []


def test_not_before_the_peer_is_heard(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    engine = _Breaks(1, 2)
    pair = make_pair(make_engine(transfer=engine), make_engine())
    pair.connect()
    pair.decode.submit(texts[-1])
    pair.turn_until(lambda: engine.count == 2)
    # Only this side turns: nothing is heard.
    for _ in range(200):
        pair.prefill.step()
    assert engine.count == 2
    assert pair.serve(texts[2:3])[texts[2].rid].tokens
    pair.turn_until(lambda: texts[-1].rid in pair.results)
    assert pair.results[texts[-1].rid].reason != "error"


def test_what_breaks_each_time_is_told(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    engine = _Breaks(*range(1, 100))
    pair = make_pair(make_engine(transfer=engine), make_engine())
    pair.connect()
    pair.serve(texts[-1:])
    assert pair.results[texts[-1].rid].reason == "error"
    assert "the connection is lost" in pair.results[texts[-1].rid].error
    assert engine.count == 2 * 3  # both sub-pools, the first time and twice again
    assert pair.leaks() == []
    assert pair.decode.leases.active == ()
