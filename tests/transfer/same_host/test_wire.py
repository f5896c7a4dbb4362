"""Garbage on the socket, from either side, hurts nobody."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvarena.pool import Arena, HostVmm
from kvarena.transfer import Region, TransferFailed
from kvarena.transfer.same_host import wire
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.ring import Ring
from same_host_support import MIB

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("name", "identity", "device", "epoch", "request", "serial", "sub_pool", "why", "manifest", "more"),
        *("add", "base", "reserved_bytes", "memory", "number", "first", "src", "dst", "lengths"),
    ]
)


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda tail: b"kvar\0\3\0\1" + tail))
def test_any_bytes_are_a_packet_or_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(wire.decode(data).body, dict)


@given(st.sampled_from(list(wire.PacketKind)), st.dictionaries(st.text(), JSON, max_size=4))
def test_a_packet_survives_the_wire(kind: wire.PacketKind, body: dict[str, Any]) -> None:
    body.pop("version", None)
    packet = wire.decode(wire.encode(kind, body))
    packet.body.pop("version", None)
    assert (packet.kind, packet.body) == (kind, body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SameHostEngine]:
    """One engine for all of the abuse."""
    with Arena(HostVmm(), 4 * MIB) as arena:
        arena.back(MIB)
        engine = SameHostEngine(arena, name="server", directory=tmp_path_factory.mktemp("w") / "s")
        with engine:
            engine.register([Region(arena.base, MIB)])
            yield engine


def dial(engine: SameHostEngine) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.settimeout(10)
    raw.connect(str(engine.socket_path))
    return raw


def still_serves(engine: SameHostEngine) -> bool:
    with Arena(HostVmm(), 4 * MIB) as arena:
        arena.back(MIB)
        with SameHostEngine(arena, name="good", directory=engine.socket_path.parent) as good:
            good.register([Region(arena.base, MIB)])
            peer = good.connect(engine.describe())
            good.submit(peer, [arena.base], [engine._arena.base], [4096]).wait(10)
            return True


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=4), st.integers(0, 3))
def test_a_server_survives_random_packets(server: SameHostEngine, packets: list[bytes], fds: int) -> None:
    with dial(server) as raw:
        for data in packets:
            with contextlib.suppress(OSError):
                wire.transmit(raw, data, [raw.fileno()] * fds)
    assert still_serves(server)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(list(wire.PacketKind)), st.dictionaries(FIELDS, JSON, max_size=5)),
        max_size=4,
    )
)
def test_a_server_survives_wellformed_nonsense_of_an_attached_peer(
    server: SameHostEngine, packets: list[tuple[wire.PacketKind, dict[str, Any]]]
) -> None:
    with dial(server) as raw:
        wire.transmit(
            raw, wire.encode(wire.PacketKind.HELLO, {"name": "fuzz", "identity": "fuzz", "device": "host"})
        )
        for kind, body in packets:
            with contextlib.suppress(OSError):
                wire.transmit(raw, wire.encode(kind, body))
    assert still_serves(server)


def test_a_server_serves_after_all_of_it_and_leaks_nothing(server: SameHostEngine) -> None:
    assert still_serves(server)
    # The server's thread comes to know of the end of each of the connections so far in its own time.
    until(lambda: not server._server._sessions)
    before = held()
    for data in (b"x" * 65536, b"kvar" + bytes(4), b"kvar\0\3\0\4{}", b"kvar\0\3\0\1[]", b"\0"):
        with dial(server) as raw:
            wire.transmit(raw, data, [raw.fileno()] * 3)
            with contextlib.suppress(OSError):
                while wire.receive(raw) is not None:
                    pass
    assert still_serves(server)
    until(lambda: held() <= before and not server._server._sessions)
    assert server.attached == ()


GOOD = {"epoch": 1, "more": False, "drop": [], "add": [], "regions": []}


@pytest.mark.parametrize(
    "export",
    [
        {"regions": [[0, 4096]]},
        {"add": [[1, 0, 4096]]},
        {"drop": [[7]]},
        {"add": [[1, 1 << 40, 4096]], "fds": 1},
        {"add": [[1, 0, 4096], [1, 4096, 4096]], "fds": 2},
        {"add": [[1, 0, 0]], "fds": 1},
        {"add": [[1, -1, 4096]], "fds": 1},
        {"add": "all"},
        {"epoch": None},
        {"more": 1},
        {"add": [[1, 0, 8192]], "fds": 1, "regions": [[0, 8192]]},
        {"welcome": {"base": 1 << 70}},
        {"welcome": {"base": (1 << 63) - 4096}},
        {"welcome": {"reserved_bytes": 1 << 62}},
        {"welcome": {"epoch": 1 << 63}},
    ],
    ids=lambda export: json.dumps(export),
)
def test_a_sender_survives_what_a_false_receiver_exports(
    tmp_path: Path, export: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    export = dict(export)
    memory = os.memfd_create("kvarena-test")
    os.ftruncate(memory, 4096)
    fds = [memory] * export.pop("fds", 0)
    about = export.pop("welcome", {})
    (tmp_path / "s").mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request.addfinalizer(listener.close)
    request.addfinalizer(lambda: os.close(memory))
    listener.bind(str(tmp_path / "s" / "false.sock"))
    listener.listen()

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            wire.receive(sock)
            welcome = {
                "name": "false",
                "identity": "id",
                "epoch": 1,
                "memory": "host",
                "device": "host",
                "base": 1 << 40,
                "reserved_bytes": 1 << 20,
                **about,
            }
            ring, fd = Ring.make()
            ring.close()
            wire.transmit(sock, wire.encode(wire.PacketKind.WELCOME, welcome), [fd])
            os.close(fd)
            with contextlib.suppress(OSError):
                wire.transmit(sock, wire.encode(wire.PacketKind.EXPORT, {**GOOD, **export}), fds)
                wire.receive(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    description = {
        "format": "kvarena-same-host",
        "version": 3,
        "path": str(tmp_path / "s" / "false.sock"),
        "name": "false",
        "identity": "id",
        "epoch": 1,
    }
    with Arena(HostVmm(), MIB) as arena, SameHostEngine(arena, name="a", directory=tmp_path / "s") as engine:
        before = held()
        with pytest.raises(TransferFailed):
            engine.connect(json.dumps(description).encode())
        thread.join(10)
        assert not thread.is_alive()
        until(lambda: held() <= before)  # the socket's thread closes the socket


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def held() -> tuple[int, int]:
    """Open descriptors, and mappings of a false receiver's memory."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("kvarena-test")


@given(st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=20), st.data())
def test_leased_pages_are_taken_once_in_any_order(pages: list[int], data: st.DataObject) -> None:
    """Against a set: what may be written next is what is leased and was not."""
    import numpy as np
    from kvarena.transfer import LeaseError
    from kvarena.transfer.same_host.sent_leases import SentLeases
    from same_host_support import a_lease

    leases, lease, left = SentLeases(), a_lease(pages), set(pages)
    for _ in range(6):
        wanted = data.draw(
            st.lists(st.sampled_from(pages), max_size=6) | st.lists(st.integers(0, 45), max_size=3)
        )
        allowed = len(set(wanted)) == len(wanted) and set(wanted) <= left  # none at all always is
        if allowed:
            leases.take(lease, "full", np.array(wanted, np.int64))
            leases.taken(lease)
            left -= set(wanted)
        else:
            with pytest.raises(LeaseError):
                leases.take(lease, "full", np.array(wanted, np.int64))


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=6),
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 10),
)
def test_intervals_answer_as_a_set_of_bytes_does(
    spans: list[tuple[int, int]], pages: list[int], page_bytes: int, base: int
) -> None:
    import numpy as np
    from kvarena.transfer.same_host.intervals import Intervals

    inside = {byte for start, nbytes in spans for byte in range(start, start + nbytes)}
    intervals = Intervals(Region(start, nbytes) for start, nbytes in spans)
    ids = np.array(pages, np.int64)
    wanted = [set(range(base + page * page_bytes, base + (page + 1) * page_bytes)) for page in pages]
    assert intervals.covers_pages(base, ids, page_bytes) == all(bytes_ <= inside for bytes_ in wanted)
    outside = [index for index, bytes_ in enumerate(wanted) if not bytes_ <= inside]
    first = intervals.first_outside(base + ids * page_bytes, np.full_like(ids, page_bytes))
    assert first == (outside[0] if outside else None)
    for bytes_ in wanted:
        assert intervals.touches(min(bytes_), max(bytes_) + 1) == bool(bytes_ & inside)
