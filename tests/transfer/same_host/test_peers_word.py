"""A peer's word decides nothing about our memory, and what a peer can fill or prolong has a bound."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvarena.pool import Arena, HostVmm
from kvarena.transfer import EngineUnavailable, QuiesceTimeout, Region, SocketPathError
from kvarena.transfer.same_host import server as server_module
from kvarena.transfer.same_host import wire
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.same_host.errors import PeerRefused, WireError
from kvarena.transfer.same_host.incoming import IncomingTable, Source
from kvarena.transfer.same_host.mapped_arena import MappedArena
from kvarena.transfer.same_host.ring import RECORDS, Record, Ring
from kvarena.transfer.same_host.sent_leases import SentLeases
from kvarena.transfer.same_host.sockets import dial
from same_host_support import MIB, SameHost, a_lease

BASE = 1 << 40
NOTHING: dict[str, Any] = {"epoch": 1, "more": False, "drop": [], "add": [], "regions": []}


@pytest.fixture
def mapped() -> Iterator[MappedArena]:
    """A receiver's arena with 1 MiB, all of it registered."""
    driver = HostVmm()
    handle = driver.create(MIB)
    arena = MappedArena(driver, "receiver", BASE, 4 * MIB)
    fd = driver.export_fd(handle)
    export(arena, lambda: None, add=[[1, 0, MIB]], regions=[[0, MIB]], fds=(fd,))
    yield arena
    arena.close()
    driver.release(handle)


def export(arena: MappedArena, drain: Callable[[], None], *, fds: tuple[int, ...] = (), **body: Any) -> None:
    packet = wire.Packet(wire.PacketKind.EXPORT, {**NOTHING, **body}, fds)
    assert not arena.stage(packet)
    arena.commit(drain)


@pytest.mark.parametrize(
    "body",
    [{"drop": [[1]]}, {"regions": [[0, 4096]]}, {"regions": []}],
    ids=["a handle is dropped", "a region shrinks", "a region goes"],
)
def test_what_a_receiver_takes_back_is_drained_first_whatever_it_says(
    mapped: MappedArena, body: dict[str, Any]
) -> None:
    """One packet that dropped a handle without asking for a fence unmapped what was being written."""
    states = []
    export(mapped, lambda: states.append(mapped.mapped_bytes), **body)
    assert states == [MIB]


def test_an_update_without_end_is_refused_at_a_bound(mapped: MappedArena) -> None:
    rows = [[7] for _ in range(512)]
    packet = wire.Packet(wire.PacketKind.EXPORT, {**NOTHING, "more": True, "drop": rows}, ())
    for _ in range(32):
        assert mapped.stage(packet)
    with pytest.raises(WireError, match="16896 rows"):
        mapped.stage(packet)


def test_names_that_a_receiver_sends_are_forgotten_at_a_bound_of_bytes() -> None:
    leases = SentLeases()
    for serial in range(1000):
        leases.end((f"{serial:060000}", serial), "was revoked")
    assert sum(len(request) for request, _ in leases._ended) <= 16 * MIB


def test_surrogates_are_not_text_in_any_encoding() -> None:
    header = wire.encode(wire.PacketKind.FAILED, {})[:-2]
    for text in (b'{"why":"\xed\xa0\x80"}', b'{"why":"\\ud800"}', '{"why":"x"}'.encode("utf-16")):
        with pytest.raises(WireError):
            wire.decode(header + text)


class EndlessRing:
    """A sender's ring that is always full of news."""

    has_news = True

    def __init__(self) -> None:
        self.taken = 0

    def next_ended(self) -> tuple[Record, bool]:
        self.taken += 1
        if self.taken > 10 * RECORDS:
            raise WireError("it was read without end")
        return Record(bytes(16), 0, 1, 0), True


def test_a_ring_that_is_kept_full_holds_nobody_for_more_than_its_records() -> None:
    table, ring, nonsense = IncomingTable(), EndlessRing(), []
    table.listen(Source("sender", ring, nonsense.append))  # type: ignore[arg-type]
    table.collect()
    assert nonsense == []
    assert ring.taken == RECORDS


@contextlib.contextmanager
def false_receiver(directory: Path, talk: Callable[[socket.socket], object]) -> Iterator[bytes]:
    """A description, and a process behind it that answers HELLO as it likes."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / "false.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                hello = wire.receive(sock)
                assert hello is not None
                talk(sock)
                wire.receive(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        about = {"format": "kvarena-same-host", "version": wire.VERSION, "path": str(path)}
        yield wire.json.dumps({**about, "name": "false", "identity": "id", "epoch": 1}).encode()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def engine(directory: Path) -> Iterator[SameHostEngine]:
    """One with 1 MiB, whose patience is short."""
    with Arena(HostVmm(), 4 * MIB) as arena:
        arena.back(MIB)
        with SameHostEngine(arena, name="a", directory=directory, drain_timeout=1.0) as engine:
            engine.register([Region(arena.base, MIB)])
            yield engine


def test_descriptors_that_come_with_a_refusal_are_closed(engine: SameHostEngine, directory: Path) -> None:
    """64 stayed open for good with each refused connect."""

    def talk(sock: socket.socket) -> None:
        refusal = wire.encode(wire.PacketKind.REFUSE, {"code": "name", "why": "no"})
        wire.transmit(sock, refusal, [sock.fileno()] * wire.FDS_PER_PACKET)

    with false_receiver(directory, talk) as description:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(PeerRefused, match="no"):
            engine.connect(description)
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_refusal_after_the_welcome_is_reported_with_its_reason(
    engine: SameHostEngine, directory: Path
) -> None:
    """The socket was closed already when its timeout was set: an untyped EBADF."""

    def talk(sock: socket.socket) -> None:
        ring, fd = Ring.make()
        ring.close()
        about = {"identity": "id", "epoch": 1, "memory": "host", "device": "host"}
        welcome = {**about, "base": BASE, "reserved_bytes": MIB}
        wire.transmit(sock, wire.encode(wire.PacketKind.WELCOME, welcome), [fd])
        os.close(fd)
        wire.transmit(sock, wire.encode(wire.PacketKind.REFUSE, {"code": "name", "why": "second thoughts"}))

    with (
        false_receiver(directory, talk) as description,
        pytest.raises(PeerRefused, match="second thoughts"),
    ):
        engine.connect(description)


def stranger(engine: SameHostEngine, name: str) -> socket.socket:
    raw = dial(engine.socket_path, 10)
    wire.transmit(raw, wire.encode(wire.PacketKind.HELLO, {"name": name, "identity": name}))
    return raw


def attached(engine: SameHostEngine, name: str) -> bool:
    deadline = time.monotonic() + 20
    while name not in engine.attached and time.monotonic() < deadline:
        time.sleep(0.005)
    return name in engine.attached


def test_a_lease_bound_to_a_sender_is_revoked_without_waiting_for_others(
    engine: SameHostEngine, directory: Path
) -> None:
    """A stranger that says HELLO and nothing more held `revoke` for as long as the engine is patient."""
    with stranger(engine, "stranger"):
        assert attached(engine, "stranger")
        with Arena(HostVmm(), 4 * MIB) as arena:
            arena.back(MIB)
            with SameHostEngine(arena, name="good", directory=directory) as good:
                good.connect(engine.describe())
                assert attached(engine, "good")
                lease = a_lease([1])
                engine.expect(lease, sender="good")
                engine.revoke(lease)
                assert set(engine.attached) == {"good", "stranger"}  # nobody was let go as late


def test_attached_strangers_have_a_bound(engine: SameHostEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_ATTACHED", 3)
    with contextlib.ExitStack() as stack:
        for name in ("x", "y", "z"):
            stack.enter_context(stranger(engine, name))
            assert attached(engine, name)
        late = stack.enter_context(stranger(engine, "late"))
        answer = wire.receive(late)
        assert answer is not None
        assert answer.kind is wire.PacketKind.REFUSE
        assert answer.body["code"] == "full"
        assert set(engine.attached) == {"x", "y", "z"}


def test_copies_to_a_peer_that_was_let_go_are_waited_for(sender: SameHost, receiver: Any) -> None:
    """Our own memory was given back while copies to a peer that had gone still read it."""
    engine = sender.engine
    engine._drain_timeout = 0.3
    peer = engine.connect(receiver.describe())
    engine.peer(peer)._push._drain_timeout = engine.peer(peer)._drain_timeout = 0.3
    held = threading.Event()
    engine._copier._start(lambda: held.wait(60), None)  # type: ignore[attr-defined]
    try:
        engine.submit(peer, [sender.base], [receiver.base], [MIB])
        engine.disconnect(peer)
        before = Path("/proc/self/maps").read_text().count("memfd:kvarena")
        with pytest.raises(QuiesceTimeout):
            sender.unregister((0, 8 * MIB))
        assert engine.regions
    finally:
        held.set()
    engine._drain_timeout = 30.0
    sender.unregister((0, 8 * MIB))
    assert Path("/proc/self/maps").read_text().count("memfd:kvarena") == before - 1
    sender.register((0, 8 * MIB))


@pytest.mark.parametrize("failing", ["first thread", "second thread", "spare descriptor"])
def test_a_construction_that_fails_leaves_nothing_behind(
    directory: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Threads stayed, and with them the name."""
    with Arena(HostVmm(), 4 * MIB) as arena:
        before = (len(os.listdir("/proc/self/fd")), threading.active_count())
        with monkeypatch.context() as patch:
            if failing == "spare descriptor":
                patch.setattr(server_module.os, "open", refuse_after(0, os.open))
            else:
                start = threading.Thread.start
                patch.setattr(threading.Thread, "start", refuse_after(failing == "second thread", start))
            with pytest.raises(EngineUnavailable, match="could not be started"):
                SameHostEngine(arena, name="a", directory=directory)
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
        assert list(directory.iterdir()) == []
        SameHostEngine(arena, name="a", directory=directory).close()


def refuse_after(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which after so many calls says that there is no more."""
    left = [None] * count

    def refuse(*arguments: Any, **options: Any) -> Any:
        if arguments[:1] == (str(os.devnull),) or not isinstance(arguments[0], (str, os.PathLike)):
            if not left:
                raise OSError(24, "Too many open files")
            left.pop()
        return function(*arguments, **options)

    return refuse


@pytest.mark.parametrize("how", ["open to everyone", "somebody else's", "below somebody else's link"])
def test_a_directory_that_others_can_replace_is_refused(tmp_path: Path, how: str) -> None:
    """Root changed the mode of a file of the attacker's choice, below a parent of the attacker's."""
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o700)
    above = parent
    if how == "open to everyone":
        parent.chmod(0o777)
    elif os.geteuid():
        pytest.skip("only root can give files away")
    elif how == "somebody else's":
        os.chown(parent, 12345, 12345)
    else:
        above = tmp_path / "link"
        above.symlink_to(parent)
        os.chown(above, 12345, 12345, follow_symlinks=False)
    with Arena(HostVmm(), 4 * MIB) as arena, pytest.raises(SocketPathError, match="others can replace it"):
        SameHostEngine(arena, name="a", directory=above / "s")
    assert list(parent.iterdir()) == []
