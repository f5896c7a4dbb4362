"""Control messages that no worker of ours sends: whoever gets them goes on, and says what was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.codec import Codec
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.link import Spoke
from kvarena.plugin.engines.embedded.peers import describe_model
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.transfer import Lease, LeaseError, Manifest, ManifestMismatch, TransferFailed

if TYPE_CHECKING:
    from conftest import Pair  # type: ignore[import-not-found]

MakeEngine = Callable[..., Engine]
MakePair = Callable[[Engine, Engine], "Pair"]
DEEP = b"\x82\xa4type\xa4Ping\xa1x" + b"\x91" * 200_000 + b"\xc0"
PREFILL = Codec(control.TO_DECODE, control.TO_PREFILL)
TRANSFERS = [None, "same-host"]


def test_a_message_that_is_nested_too_deeply_is_dropped(make_engine: MakeEngine) -> None:
    assert PREFILL.decode([DEEP]) is None
    with pytest.raises(LeaseError):
        Lease.decode(DEEP)
    with pytest.raises(ManifestMismatch):
        Manifest.decode(DEEP)
    with pytest.raises(ManifestMismatch):
        make_engine().channel.connect(DEEP)
    for transfer in ("mooncake", "nixl", "same-host"):
        with pytest.raises(TransferFailed):
            make_engine(transfer=transfer).ledger.engine.connect(b"[" * 200_000 + DEEP)


def test_a_stranger_is_neither_pinged_nor_heard_as_a_worker(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    workers = set(pair.decode.hub.last_heard)
    with Spoke(pair.decode.hub.address, b"stranger", codec=PREFILL) as stranger:
        for message in (control.Ping(), control.Refused("go away"), control.PrefillFailed(1, "no", True)):
            stranger.send(message)
        pair.serve(texts[:3])
        stranger.send(control.Join(b"", ""))
        pair.turn_until(lambda: bool(stranger.receive(0.01)))
    assert set(pair.decode.hub.last_heard) == workers
    assert [type(said) for said in pair.said["decode"]].count(control.Refused) == 1  # its Join
    assert "go away" not in str(pair.said["decode"])


def test_a_worker_whose_second_hello_is_refused_is_let_go(
    make_engine: MakeEngine, make_pair: MakePair, texts: list[Request]
) -> None:
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    assert pair.prefill.link is not None
    pair.decode.submit(texts[-1])
    pair.decode.step()  # leased, and not yet written
    pair.prefill.link.send(control.Join(b"", ""))
    pair.turn_until(lambda: texts[-1].rid in pair.results)
    assert "serves no longer" in pair.results[texts[-1].rid].error
    for _ in range(20):
        pair.decode.step()
    assert pair.decode.hub.last_heard == {}


@pytest.mark.parametrize("token", [-1, 259, 2**63, 2**64 - 1, -(2**63)])
def test_a_first_token_that_there_is_not_ends_its_request_alone(make_engine: MakeEngine, token: int) -> None:
    from kvarena.plugin.engines.embedded.decode import DecodeServer

    engine, other, said = make_engine(), make_engine(), list[control.Message]()
    server = DecodeServer(engine, said.append)
    try:
        with Spoke(server.hub.address, codec=PREFILL) as worker:
            worker.send(control.Join(other.channel.hello(), describe_model(other.config.model)))
            server.submit(Request(7, [256, 1, 2], 3))
            for _ in range(3000):
                if any(isinstance(message, control.Finished) for message in said):
                    break
                server.step()
                for message in worker.receive(0.01):
                    if isinstance(message, control.Prefill):
                        lease = Lease.decode(message.lease)
                        written = {name: len(pages) for name, pages in lease.pages.items()}
                        worker.send(control.PrefillDone(7, lease.serial, written, token, 0.0, 0.0))
    finally:
        server.close()
    (finished,) = (message for message in said if isinstance(message, control.Finished))
    assert f"its first token is {token}" in finished.result.error
    assert engine.book.leaks() == []


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(
    "odd",
    [
        {"pages": {}},
        {"pages": {"full": (4096, 9)}},
        {"pages": {"full": (2**64 - 1, 9), "swa": (2**64 - 1, 9)}},
        {"pages": {"full": (-1, 9), "swa": (-1, 9)}},
        {"seams": (2**63,)},
        {"seams": (-1,)},
    ],
    ids=str,
)
def test_pages_that_cannot_be_are_refused_before_any_request(
    make_engine: MakeEngine, make_pair: MakePair, odd: dict[str, Any], transfer: str | None
) -> None:
    decode = make_engine(transfer=transfer)
    hello = msgspec.msgpack.decode(decode.channel.hello())
    pair = make_pair(make_engine(transfer=transfer), decode)
    decode.channel.hello = lambda: msgspec.msgpack.encode(hello | odd)  # type: ignore[method-assign]
    pair.turn_until(lambda: pair.heard("prefill", control.Refused))
    (refused,) = (said for said in pair.said["prefill"] if isinstance(said, control.Refused))
    assert "pages" in refused.what
    pair.turn_until(lambda: pair.heard("decode", control.Refused))


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("page", [-1, 2**63, 2**63 - 1, 2, None])
def test_a_lease_of_pages_that_cannot_be_fails_its_request_alone(
    make_engine: MakeEngine,
    make_pair: MakePair,
    texts: list[Request],
    transfer: str | None,
    page: int | None,
) -> None:
    """None: the first page, again and again; it would be written several times, and count as all."""
    pair = make_pair(make_engine(transfer=transfer), make_engine(transfer=transfer))
    pair.connect()
    send = pair.decode.hub.send

    def forge(peer: bytes, message: control.Message) -> bool:
        if isinstance(message, control.Prefill) and message.request.rid == texts[4].rid:
            lease = msgspec.msgpack.decode(message.lease)
            for name, ids in lease["pages"].items():
                lease["pages"][name] = [ids[0] if page is None else page] * len(ids)
            message = control.Prefill(message.request, msgspec.msgpack.encode(lease))
        return send(peer, message)

    pair.decode.hub.send = forge  # type: ignore[method-assign]
    served = pair.serve(texts[3:6])
    assert {rid for rid, result in served.items() if result.reason == "error"} == {texts[4].rid}
    pair.turn_until(lambda: not pair.prefill.busy)
    assert pair.leaks() == []
