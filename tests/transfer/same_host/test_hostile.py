"""Peers that flood, lie about whom they speak for, or pass numbers that no memory has."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvarena.pool import Arena, HostVmm
from kvarena.transfer import LeaseError, PageBatch, PageError, Region, TransferFailed
from kvarena.transfer.same_host import attach as attach_module
from kvarena.transfer.same_host import channel as channel_module
from kvarena.transfer.same_host import server as server_module
from kvarena.transfer.same_host import sockets as path_module
from kvarena.transfer.same_host import wire
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.same_host.errors import PeerRefused, WireError
from kvarena.transfer.same_host.incoming import IncomingTable, Source
from kvarena.transfer.same_host.intervals import Intervals
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sent_leases import lease_digest
from kvarena.transfer.same_host.sockets import dial
from same_host_support import MIB, PAGE, a_lease

TOP = (1 << 63) - 1


@pytest.fixture
def make_engine(directory: Path) -> Iterator[Callable[[str], SameHostEngine]]:
    """Makes engines over 1 MiB of registered memory."""
    with contextlib.ExitStack() as stack:

        def make(name: str) -> SameHostEngine:
            arena = stack.enter_context(Arena(HostVmm(), 4 * MIB))
            arena.back(MIB)
            engine = stack.enter_context(SameHostEngine(arena, name=name, directory=directory))
            engine.register([Region(arena.base, MIB)])
            return engine

        yield make


@pytest.fixture
def server(make_engine: Callable[[str], SameHostEngine]) -> SameHostEngine:
    """The one that is abused."""
    return make_engine("server")


@pytest.fixture
def good(make_engine: Callable[[str], SameHostEngine]) -> SameHostEngine:
    """One that behaves."""
    return make_engine("good")


def knock(engine: SameHostEngine) -> socket.socket:
    return dial(engine.socket_path, 10)


def say_hello(raw: socket.socket, name: str, identity: str = "i") -> None:
    wire.transmit(
        raw, wire.encode(wire.PacketKind.HELLO, {"name": name, "identity": identity, "device": "host"})
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def was_dropped(raw: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while (packet := wire.receive(raw)) is not None:
            packet.close_fds()
    return True


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [([TOP - 9], [100]), ([4096, TOP - 9], [1, 100]), ([5000], [TOP]), ([TOP], [TOP]), ([-5], [TOP])],
)
def test_a_range_whose_end_64_bits_cannot_hold_is_outside(starts: list[int], lengths: list[int]) -> None:
    """It would be copied, and the process would die of it."""
    inside = Intervals([Region(4096, 8192)])
    first = inside.first_outside(np.array(starts, np.int64), np.array(lengths, np.int64))
    assert first == len(starts) - 1


@pytest.mark.parametrize(
    "odd", [[1.5], ["1"], [None], [1 << 63], [1 << 64], [[1], [2, 3]], np.array([2**63])]
)
def test_what_are_no_integers_of_64_bits_is_refused_with_the_state_unchanged(
    server: SameHostEngine, good: SameHostEngine, odd: Any
) -> None:
    peer, lease = good.connect(server.describe()), a_lease([1])
    with pytest.raises(TransferFailed, match=r"integers|past|array"):
        good.submit(peer, odd, [1], [1])
    with pytest.raises(PageError):
        good.submit_pages(peer, PageBatch(odd, [1], PAGE, lease))
    with pytest.raises(PageError):
        good.submit_pages(peer, PageBatch([1], odd, PAGE, lease))
    with pytest.raises(LeaseError):
        good.submit_pages(peer, PageBatch([1], [1], PAGE, a_lease(odd, 2)))
    with pytest.raises(PageError):
        lease.check("full", odd)
    good.submit_pages(peer, PageBatch([1], [1], PAGE, lease)).wait(10)


@pytest.mark.parametrize(("name", "identity"), [("", "i"), ("x", ""), ("", ""), ("../x", "i"), ("ü", "i")])
def test_who_has_no_name_is_dropped_and_nothing_of_it_stays(
    server: SameHostEngine, name: str, identity: str
) -> None:
    before = Path("/proc/self/maps").read_text().count("kv-done")
    for _ in range(3):
        with knock(server) as raw:
            say_hello(raw, name, identity)
            assert was_dropped(raw)
    until(lambda: Path("/proc/self/maps").read_text().count("kv-done") == before)
    assert server.attached == ()


def test_connections_that_say_nothing_are_dropped_when_others_come(
    server: SameHostEngine, good: SameHostEngine
) -> None:
    with contextlib.ExitStack() as stack:
        peer = good.connect(server.describe())
        silent = [stack.enter_context(knock(server)) for _ in range(200)]
        assert all(was_dropped(raw) for raw in silent[:100])
        good.submit(peer, [good.regions[0].address], [server.regions[0].address], [4096]).wait(10)
        assert server.attached == ("good",)


def test_a_connection_that_comes_while_the_engine_closes_is_ended(
    server: SameHostEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came too late to be ended with the others, and its socket stayed open."""
    came, go_on = threading.Event(), threading.Event()

    def slow_uid(sock: socket.socket) -> int:
        came.set()
        assert go_on.wait(10)
        return wire.peer_uid(sock)

    with knock(server) as first:
        say_hello(first, "first")
        until(lambda: server.attached == ("first",))
        monkeypatch.setattr(server_module, "peer_uid", slow_uid)
        with knock(server) as late:
            assert came.wait(10)
            closing = threading.Thread(target=server.close)
            closing.start()
            assert was_dropped(first)  # so those that were there are ended
            until(lambda: server._loop._stopping)
            gc.disable()
            try:
                go_on.set()
                closing.join(10)
                assert was_dropped(late)
            finally:
                gc.enable()


def test_without_a_descriptor_for_it_a_connection_is_dropped_and_not_left_waiting(
    server: SameHostEngine, good: SameHostEngine
) -> None:
    """Left in the queue it would keep the loop's thread busy."""
    peer = good.connect(server.describe())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 1024), limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            raw.connect(str(server.socket_path))
            assert was_dropped(raw)
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    good.submit(peer, [good.regions[0].address], [server.regions[0].address], [4096]).wait(10)
    with knock(server) as raw:
        say_hello(raw, "later")
        until(lambda: "later" in server.attached)


def test_a_full_queue_is_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever attaches while many others do is not refused."""
    directory.mkdir(mode=0o700)
    path = directory / "busy.sock"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(path))
        listener.listen(0)
        while True:
            raw = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            raw.setblocking(False)
            try:
                raw.connect(str(path))
            except BlockingIOError:
                break
        with pytest.raises(PeerRefused, match="unreachable"):
            dial(path, 0.05)

        def take_one(_seconds: float) -> None:
            stack.enter_context(listener.accept()[0])

        patched = SimpleNamespace(monotonic=time.monotonic, sleep=take_one)
        monkeypatch.setattr(path_module, "time", patched)
        assert stack.enter_context(dial(path, 30)).getpeername() == str(path)


@contextlib.contextmanager
def false_peer(directory: Path, talk: Callable[[socket.socket], object]) -> Iterator[bytes]:
    """The description of a peer that says who it is, but exports nothing: after that it talks."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = str(directory / "false.sock")

    def serve() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            ring, fd = Ring.make()
            ring.close()
            about = {"identity": "id", "epoch": 1, "memory": "host", "device": "host"}
            about |= {"base": 1 << 40, "reserved_bytes": MIB}
            wire.transmit(sock, wire.encode(wire.PacketKind.WELCOME, about), [fd])
            os.close(fd)
            talk(sock)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        about = {"format": "kvarena-same-host", "version": wire.VERSION, "path": path}
        yield json.dumps(about | {"name": "false", "identity": "id", "epoch": 1}).encode()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def impatient(directory: Path) -> Iterator[SameHostEngine]:
    """An engine that waits for a peer for 0.2 s."""
    with Arena(HostVmm(), MIB) as arena:
        arena.back(MIB)
        with SameHostEngine(arena, name="a", directory=directory, connect_timeout=0.2) as engine:
            yield engine


REVOKE = wire.encode(wire.PacketKind.REVOKE, {"request": "r", "serial": 1})


def test_packets_that_lead_nowhere_do_not_keep_a_sender_for_ever(
    impatient: SameHostEngine, directory: Path
) -> None:
    def talk(sock: socket.socket) -> None:
        while True:
            wire.transmit(sock, REVOKE)
            wire.receive(sock)

    with false_peer(directory, talk) as description, pytest.raises(PeerRefused, match="timed out"):
        impatient.connect(description)


def test_a_packet_that_is_there_already_is_not_read_when_time_is_up(
    impatient: SameHostEngine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is always quick enough once kept a sender for as long as it liked."""
    sent, heard, receive = threading.Event(), [], attach_module.receive

    def talk(sock: socket.socket) -> None:
        # First: who closes with this packet unread resets the connection, and what it sent may be lost.
        hello = wire.receive(sock)
        assert hello is not None
        heard.append(hello.kind)
        wire.transmit(sock, REVOKE)
        sent.set()
        while (packet := wire.receive(sock)) is not None:
            heard.append(packet.kind)

    def receive_late(sock: socket.socket) -> wire.Packet | None:
        assert sent.wait(20)
        monkeypatch.setattr(attach_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1))
        return receive(sock)

    monkeypatch.setattr(attach_module, "receive", receive_late)
    with false_peer(directory, talk) as description, pytest.raises(PeerRefused, match="timed out"):
        impatient.connect(description)
    assert heard == [wire.PacketKind.HELLO]


@pytest.mark.parametrize("code", [errno.ETOOMANYREFS, errno.EMFILE])
def test_a_peer_that_cannot_be_told_is_let_go(
    server: SameHostEngine, good: SameHostEngine, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It would go on with what it knew, and whoever waits for its answer would wait in vain."""
    (region,) = server.regions
    server.unregister([region])
    good.connect(server.describe())
    assert server.attached == ("good",)
    send = channel_module.transmit

    def refuse(sock: socket.socket, data: bytes, fds: Any = ()) -> None:
        if wire.decode(data).kind is wire.PacketKind.EXPORT:
            raise OSError(code, os.strerror(code))
        send(sock, data, fds)

    monkeypatch.setattr(channel_module, "transmit", refuse)
    server.register([region])
    until(lambda: server.attached == ())


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    data = wire.encode(wire.PacketKind.FAILED, {"why": "\ud83d"})
    with pytest.raises(WireError):
        wire.decode(data)
    assert wire.decode(wire.encode(wire.PacketKind.FAILED, {"why": "\U0001f600"})).body["why"] == "\U0001f600"


@pytest.fixture
def sources() -> Iterator[tuple[IncomingTable, Source, Source, Ring]]:
    """A table, two sources of one name, and the sender's end of the second."""
    table, rings = IncomingTable(), list[Ring]()
    made: list[Source] = []
    for _ in range(2):
        receiver, fd = Ring.make()
        rings += [receiver, Ring(fd)]
        os.close(fd)
        made.append(Source("s", receiver, lambda _why: None))
        table.listen(made[-1])
    yield table, made[0], made[1], rings[3]
    for ring in rings:
        ring.close()


def test_a_sender_cannot_fail_what_another_one_writes(
    sources: tuple[IncomingTable, Source, Source, Ring],
) -> None:
    table, lease = sources[0], a_lease([1])
    incoming = table.expect(lease, 0, "honest")
    with pytest.raises(WireError, match="honest"):
        table.failed("liar", ("r", 1), "because")
    assert not incoming.done()
    table.failed("honest", ("r", 1), "because")
    with pytest.raises(TransferFailed, match="because"):
        incoming.done()


def test_the_end_of_a_connection_does_not_end_its_successor_of_the_same_name(
    sources: tuple[IncomingTable, Source, Source, Ring],
) -> None:
    table, old, new, sender = sources
    table.lost(old, "it attached again")
    lease = a_lease([1])
    incoming = table.expect(lease, 0, "s")
    sender.begin(lease_digest(lease), 0, 1, 0)
    sender._words[0] = 1
    assert incoming.done()
    assert new.ring.read == 1
