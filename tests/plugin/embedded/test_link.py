"""The control sockets: what is refused, what is dropped, and who is known to live."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from kvarena.plugin.engines.embedded import clock as clock_module
from kvarena.plugin.engines.embedded.access import Access, AddressInUse, new_secret
from kvarena.plugin.engines.embedded.codec import Codec
from kvarena.plugin.engines.embedded.control import TO_DECODE, TO_PREFILL, Abort, Join, Ping
from kvarena.plugin.engines.embedded.link import Hub, Spoke

SECRET = Access(new_secret())


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("127.0.0.1", access=SECRET, codec=Codec(TO_PREFILL, TO_DECODE)) as hub:
        yield hub


def _spoke(hub: Hub, identity: bytes | None = b"one") -> Spoke:
    return Spoke(hub.address, identity, access=SECRET, codec=Codec(TO_DECODE, TO_PREFILL))


def test_messages_travel_both_ways(hub: Hub) -> None:
    with _spoke(hub) as spoke:
        spoke.send(Join(b"", "model"))
        assert hub.receive(30.0) == [(b"one", Join(b"", "model"))]
        assert hub.send(b"one", Abort(7))
        assert spoke.receive(30.0) == [Abort(7)]


def test_a_port_in_use_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}"):
            Hub("127.0.0.1", port, access=SECRET)


def test_an_address_of_another_host_is_no_matter_of_ports() -> None:
    for host in ("no-such-host.invalid", "192.0.2.1"):
        with pytest.raises(AddressInUse, match=rf"cannot listen on {host}:0.*KVARENA_TRANSFER_HOST"):
            Hub(host, access=SECRET)


def test_a_peer_that_never_came_is_gone(hub: Hub) -> None:
    assert not hub.send(b"nobody", Ping())


def test_strangers_cannot_end_it(hub: Hub) -> None:
    with _spoke(hub, None) as stranger:
        for frames in ([b""], [b"\xc1"], [b"a", b"b"], [b"\x81\xa4type\xa4Nope"], [bytes(1 << 16)]):
            stranger.raw.send_multipart(frames)
    with _spoke(hub) as spoke:
        spoke.send(Ping())
        end = time.monotonic() + 30
        received = []
        while not received and time.monotonic() < end:
            received = hub.receive(0.1)
    assert received == [(b"one", Ping())]


def test_silence_is_counted_from_the_last_message(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.monotonic()]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with _spoke(hub) as spoke:
        spoke.ping(0.0)
        assert hub.receive(30.0) == [(b"one", Ping())]
        clock[0] += 40.0
        assert hub.receive() == []
        assert spoke.receive() == []
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
    spoke = _spoke(hub)
    for socket_ in (spoke, hub):
        socket_.close()
        socket_.close()
        assert socket_.raw.closed
