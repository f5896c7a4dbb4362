"""The control sockets: what is refused, what is dropped, and who is known to live."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq
from kvarena.plugin.engines.embedded import link
from kvarena.plugin.engines.embedded.control import Abort, Cancel, Ping
from kvarena.plugin.engines.embedded.link import AddressInUse, Hub, Spoke


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def test_messages_travel_both_ways(hub: Hub) -> None:
    with Spoke(hub.address, identity=b"one") as spoke:
        spoke.send(Cancel(7))
        assert hub.receive(30.0) == [(b"one", Cancel(7))]
        assert hub.send(b"one", Abort(7))
        assert spoke.receive(30.0) == [Abort(7)]


def test_a_port_in_use_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}"):
            Hub(port=port)


def test_an_address_of_another_host_is_no_matter_of_ports() -> None:
    for host in ("no-such-host.invalid", "192.0.2.1"):
        with pytest.raises(AddressInUse, match=rf"cannot listen on {host}:0.*KVARENA_TRANSFER_HOST"):
            Hub(host)


def test_a_peer_that_never_came_is_gone(hub: Hub) -> None:
    assert not hub.send(b"nobody", Ping())


def test_strangers_cannot_end_it(hub: Hub) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(hub.address)
    for frames in ([b""], [b"\xc1"], [b"a", b"b"], [b"\x81\xa4type\xa4Nope"], [bytes(1 << 16)]):
        stranger.send_multipart(frames)
    stranger.close()
    context.term()
    with Spoke(hub.address, identity=b"one") as spoke:
        spoke.send(Ping())
        end = time.monotonic() + 30
        received = []
        while not received and time.monotonic() < end:
            received = hub.receive(0.1)
    assert received == [(b"one", Ping())]


def test_silence_is_counted_from_the_last_message(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.monotonic()]
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Spoke(hub.address, identity=b"one") as spoke:
        spoke.ping(0.0)
        assert hub.receive(30.0) == [(b"one", Ping())]
        clock[0] += 40.0
        assert hub.silence(b"one") == 40.0
        assert spoke.silence() == 40.0
        spoke.ping(60.0)
        assert hub.receive(0.05) == []
        hub.ping(0.0)
        assert spoke.receive(30.0) == [Ping()]
        assert spoke.silence() == 0.0
    hub.forget(b"one")
    assert hub.last_heard == {}


def test_closing_twice_is_no_error(hub: Hub) -> None:
    spoke = Spoke(hub.address)
    for socket_ in (spoke, hub):
        socket_.close()
        socket_.close()
        assert socket_.raw.closed
