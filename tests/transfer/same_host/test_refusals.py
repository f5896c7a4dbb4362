"""Bad paths, bad peers and bad memory are refused with a reason, and change nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvarena.pool import Arena, HostVmm
from kvarena.pool.testing import FailingDriver
from kvarena.transfer import (
    HandleImportError,
    Manifest,
    ManifestMismatch,
    PeerRefused,
    Region,
    RegistrationError,
    SocketPathError,
    SubPoolManifest,
    TransferFailed,
)
from kvarena.transfer.same_host import server as server_module
from kvarena.transfer.same_host import sockets as path_module
from kvarena.transfer.same_host import wire
from kvarena.transfer.same_host.copy.host import HostCopier
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.testing import RemoteHost, assert_same_bytes
from same_host_support import MIB, PAGE, SameHost


@pytest.fixture
def arena() -> Any:
    """8 MiB backed, nothing registered."""
    with Arena(HostVmm(), 16 * MIB) as arena:
        arena.back(8 * MIB)
        yield arena


class TestSocketPath:
    def test_one_that_a_live_engine_holds_is_refused(self, arena: Arena, directory: Path) -> None:
        with SameHostEngine(arena, name="a", directory=directory) as first:
            with pytest.raises(SocketPathError, match="another engine listens"):
                SameHostEngine(arena, name="a", directory=directory)
            assert first.socket_path.is_socket()
            with SameHostEngine(arena, name="b", directory=directory) as other:
                assert other.connect(first.describe()) == "a"

    def test_what_dead_processes_left_under_names_of_their_own_is_removed(
        self, arena: Arena, directory: Path
    ) -> None:
        directory.mkdir(mode=0o700)
        nobody = "4194305"  # above the kernel's largest process number
        left = [directory / f"{nobody}-0123ab.sock", directory / f"{nobody}-mine.sock"]
        dead, living = directory / f"{nobody}-ffffff.sock", directory / f"{os.getpid()}-abcdef.sock"
        with contextlib.ExitStack() as stack:
            for path in (*left, dead, living):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.bind(str(path))
                sock.listen()
                # The first is an engine's of another container, whose number means nobody here.
                stack.callback(sock.close) if path == left[0] else sock.close()
            (directory / f"{nobody}-000000.sock").write_text("no socket")
            with SameHostEngine(arena, directory=directory) as engine:
                there = {path.name for path in directory.iterdir()} - {engine.socket_path.name}
        assert there == {path.name for path in (*left, living)} | {f"{nobody}-000000.sock"}

    def test_one_that_a_dead_process_left_is_taken_over(self, arena: Arena, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(str(directory / "a.sock"))
            left.listen()
        with (
            SameHostEngine(arena, name="a", directory=directory) as taken,
            SameHostEngine(arena, name="b", directory=directory) as other,
        ):
            assert other.connect(taken.describe()) == "a"

    def test_a_file_of_that_name_is_not_removed(self, arena: Arena, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        (directory / "a.sock").write_text("mine")
        with pytest.raises(SocketPathError, match="no socket"):
            SameHostEngine(arena, name="a", directory=directory)
        assert (directory / "a.sock").read_text() == "mine"

    def test_one_that_is_too_long_is_refused_with_its_length(self, arena: Arena, tmp_path: Path) -> None:
        long = tmp_path / ("d" * 100)
        with pytest.raises(SocketPathError, match="107 are the most"):
            SameHostEngine(arena, name="a", directory=long)
        assert not long.exists()

    @pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
    def test_a_name_that_would_leave_the_directory_is_refused(
        self, arena: Arena, directory: Path, name: str
    ) -> None:
        with pytest.raises(SocketPathError, match="no name"):
            path_module.listen(directory, name)

    @pytest.mark.parametrize("mode", [0o755, 0o770, 0o711])
    def test_a_directory_that_others_can_enter_is_refused(
        self, arena: Arena, directory: Path, mode: int
    ) -> None:
        directory.mkdir()
        directory.chmod(mode)
        with pytest.raises(SocketPathError, match=f"{mode:04o}"):
            SameHostEngine(arena, name="a", directory=directory)
        assert directory.stat().st_mode & 0o777 == mode

    def test_a_link_to_a_directory_is_refused(self, arena: Arena, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "real")
        with pytest.raises(SocketPathError, match="is no directory"):
            SameHostEngine(arena, name="a", directory=directory)

    def test_a_directory_of_another_user_is_refused(
        self, arena: Arena, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(SocketPathError, match=f"belongs to user {os.getuid()}"):
            SameHostEngine(arena, name="a", directory=directory)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a socket away")
    def test_a_socket_of_another_user_is_neither_taken_nor_dialled(
        self, arena: Arena, directory: Path
    ) -> None:
        with SameHostEngine(arena, name="a", directory=directory) as engine:
            os.chown(engine.socket_path, 12345, 12345)
            with pytest.raises(SocketPathError, match="12345"):
                SameHostEngine(arena, name="a", directory=directory)
            with (
                SameHostEngine(arena, name="b", directory=directory) as other,
                pytest.raises(SocketPathError, match="12345"),
            ):
                other.connect(engine.describe())

    def test_a_relative_one_is_meant_where_the_engine_was_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with Arena(HostVmm(), MIB) as arena, Arena(HostVmm(), MIB) as theirs:
            one = SameHostEngine(arena, name="one", directory=Path("s"))
            monkeypatch.chdir("/")
            with SameHostEngine(theirs, name="two", directory=tmp_path / "s") as two:
                assert two.connect(one.describe()) == "one"
            one.close()
        assert os.listdir(tmp_path / "s") == []

    def test_the_directory_is_made_for_its_owner_only(self, arena: Arena, directory: Path) -> None:
        with SameHostEngine(arena, name="a", directory=directory / "deep") as engine:
            assert (directory / "deep").stat().st_mode & 0o777 == 0o700
            assert engine.socket_path.stat().st_mode & 0o777 == 0o600


class TestPeer:
    def test_another_users_server_is_not_talked_to(
        self, sender: SameHost, receiver: RemoteHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(path_module, "peer_uid", lambda _sock: os.geteuid() + 1)
        with pytest.raises(PeerRefused) as refused:
            sender.engine.connect(receiver.describe())
        assert refused.value.code == "uid"
        assert receiver.process.call("attached") == ()

    def test_another_users_client_gets_nothing(
        self, sender: SameHost, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_module, "peer_uid", lambda _sock: os.geteuid() + 1)
        with Arena(HostVmm(), MIB) as arena, SameHostEngine(arena, name="o", directory=directory) as other:
            with pytest.raises(PeerRefused):
                other.connect(sender.describe())
            assert sender.attached() == ()

    def test_a_second_peer_of_the_same_name_is_refused_while_the_first_lives(
        self, make_sender: Callable[..., SameHost], receiver: RemoteHost, tmp_path: Path
    ) -> None:
        first, second = make_sender(), make_sender(tmp_path / "t")
        peer = first.engine.connect(receiver.describe())
        with pytest.raises(PeerRefused) as refused:
            second.engine.connect(receiver.describe())
        assert refused.value.code == "name"
        first.engine.submit(peer, [first.base], [receiver.base], [PAGE]).wait(10)
        assert first.engine.connect(receiver.describe()) == peer
        first.close()
        second.engine.connect(receiver.describe())

    def test_a_second_receiver_of_the_same_name_is_refused_while_the_first_lives(
        self, sender: SameHost, make_sender: Callable[..., SameHost], tmp_path: Path
    ) -> None:
        """In another directory it can have it; the first was detached for it, transfers and all."""
        first, second = make_sender(name="receiver"), make_sender(tmp_path / "t", name="receiver")
        peer = sender.engine.connect(first.describe())
        with pytest.raises(PeerRefused) as refused:
            sender.engine.connect(second.describe())
        assert refused.value.code == "name"
        assert second.attached() == ()
        sender.engine.submit(peer, [sender.base], [first.base], [PAGE]).wait(10)
        first.engine.close()
        assert sender.engine.connect(second.describe()) == peer
        assert second.attached() == ("sender",)

    def test_an_old_description_does_not_end_the_connection_to_the_successor(
        self, sender: SameHost, make_receiver: Callable[..., RemoteHost]
    ) -> None:
        old = make_receiver().describe()
        receiver = make_receiver()
        peer = sender.engine.connect(receiver.describe())
        with pytest.raises(PeerRefused):
            sender.engine.connect(old)
        sender.engine.submit(peer, [sender.base], [receiver.base], [PAGE]).wait(10)

    def test_another_protocol_version_is_refused_on_both_sides(
        self, sender: SameHost, receiver: RemoteHost
    ) -> None:
        newer = receiver.describe().replace(b'"version": 3', b'"version": 4')
        with pytest.raises(PeerRefused) as refused:
            sender.engine.connect(newer)
        assert refused.value.code == "version"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(str(sender.engine.socket_path))
            wire.transmit(raw, wire.encode(wire.PacketKind.HELLO, {"name": "x", "identity": "y"}, version=4))
            answer = wire.receive(raw)
            assert answer is not None
            assert answer.kind is wire.PacketKind.REFUSE
            assert "version 4, we speak 3" in answer.body["why"]
            assert wire.receive(raw) is None
        sender.engine.connect(receiver.describe())

    def test_a_successor_behind_an_old_description_is_not_mistaken(
        self, sender: SameHost, make_receiver: Callable[..., RemoteHost]
    ) -> None:
        old = make_receiver().describe()
        make_receiver()
        with pytest.raises(PeerRefused) as refused:
            sender.engine.connect(old)
        assert refused.value.code == "identity"

    def test_nobody_behind_a_description(
        self, sender: SameHost, make_receiver: Callable[..., RemoteHost]
    ) -> None:
        receiver = make_receiver()
        description = receiver.describe()
        receiver.process.call("close")
        with pytest.raises(PeerRefused) as refused:
            sender.engine.connect(description)
        assert refused.value.code == "unreachable"


def manifest(dtype: str = "bfloat16", page_bytes: int = 32768) -> Manifest:
    sub_pool = SubPoolManifest(name="full", page_bytes=page_bytes, page_size=16, layers=(0, 1), dtype=dtype)
    return Manifest(sub_pools=(sub_pool,))


class TestManifest:
    def test_another_page_geometry_is_refused_with_both_values_and_a_third_peer_connects(
        self, make_sender: Callable[..., SameHost], make_receiver: Callable[..., RemoteHost]
    ) -> None:
        """O3: bf16 against fp8 pages."""
        receiver = make_receiver(manifest=manifest())
        fp8 = make_sender(name="fp8", manifest=manifest("float8_e4m3fn", 16384))
        with pytest.raises(ManifestMismatch, match=r"16384.*32768") as refused:
            fp8.engine.connect(receiver.describe())
        assert {difference.field for difference in refused.value.differences} == {
            "full.dtype",
            "full.page_bytes",
        }
        assert "'float8_e4m3fn', theirs 'bfloat16'" in str(refused.value).replace('"', "")
        assert receiver.process.call("attached") == ()
        assert_same_bytes(receiver.read(0, 8 * MIB), bytes(8 * MIB))
        third = make_sender(name="third", manifest=manifest())
        peer = third.engine.connect(receiver.describe())
        third.engine.submit(peer, [third.base], [receiver.base], [PAGE]).wait(10)

    def test_a_peer_that_names_no_geometry_is_refused_by_one_that_does(
        self, make_sender: Callable[..., SameHost], make_receiver: Callable[..., RemoteHost]
    ) -> None:
        receiver = make_receiver(manifest=manifest())
        with pytest.raises(ManifestMismatch):
            make_sender().engine.connect(receiver.describe())


class TestMemory:
    @pytest.fixture
    def driver(self, op: str) -> FailingDriver:
        """Fails in that operation when a test says so."""
        return FailingDriver(HostVmm(), ops=[op])

    @pytest.fixture
    def engine(self, driver: FailingDriver, directory: Path) -> Iterator[SameHostEngine]:
        """Over an arena of that driver, 8 MiB backed."""
        with Arena(driver, 16 * MIB) as arena:
            arena.back(8 * MIB)
            with SameHostEngine(arena, name="s", directory=directory) as engine:
                yield engine

    @pytest.mark.parametrize("op", ["reserve", "import_fd", "map"])
    def test_a_handle_that_cannot_be_mapped_leaves_nothing(
        self, driver: FailingDriver, engine: SameHostEngine, receiver: RemoteHost
    ) -> None:
        base = engine._arena.base
        engine.register([Region(base, 8 * MIB)])
        before = Path("/proc/self/maps").read_text().count("memfd:kvarena")
        driver.fail_at = 1
        with pytest.raises(HandleImportError, match="INJECTED"):
            engine.connect(receiver.describe())
        assert Path("/proc/self/maps").read_text().count("memfd:kvarena") == before
        peer = engine.connect(receiver.describe())  # the driver fails only once
        engine.submit(peer, [base], [receiver.base], [PAGE]).wait(10)

    @pytest.mark.parametrize("op", ["import_fd", "map"])
    def test_growth_that_cannot_be_mapped_ends_the_connection(
        self, driver: FailingDriver, engine: SameHostEngine, receiver: RemoteHost
    ) -> None:
        base = engine._arena.base
        engine.register([Region(base, 8 * MIB)])
        peer = engine.connect(receiver.describe())
        driver.fail_at = 1
        receiver.grow(12 * MIB)
        receiver.register((8 * MIB, 4 * MIB))
        until_gone(engine, peer)
        with pytest.raises(TransferFailed):
            engine.submit(peer, [base], [receiver.base], [PAGE])
        engine.connect(receiver.describe())
        engine.submit(peer, [base], [receiver.base + 8 * MIB], [PAGE]).wait(10)

    @pytest.mark.parametrize(
        ("offset", "nbytes", "code"),
        [(0, 8 * MIB + 1, "EFAULT"), (8 * MIB, PAGE, "EFAULT"), (-PAGE, PAGE, "EFAULT"), (0, 0, "EINVAL")],
        ids=["more than is backed", "behind what is backed", "outside the arena", "empty"],
    )
    def test_memory_that_is_not_there_is_not_registered(
        self, arena: Arena, directory: Path, offset: int, nbytes: int, code: str
    ) -> None:
        with SameHostEngine(arena, name="a", directory=directory) as engine:
            engine.register([Region(arena.base, PAGE)])
            before = (engine.regions, engine.describe())
            with pytest.raises(RegistrationError) as refused:
                engine.register([Region(arena.base + 2 * PAGE, PAGE), Region(arena.base + offset, nbytes)])
            assert refused.value.code == code
            assert (engine.regions, engine.describe()) == before

    @pytest.mark.parametrize("op", ["export_fd"])
    def test_a_handle_that_cannot_be_exported_is_not_registered(
        self, driver: FailingDriver, engine: SameHostEngine
    ) -> None:
        arena = engine._arena
        assert isinstance(arena, Arena)
        arena.grow(12 * MIB)
        before = (engine.describe(), len(os.listdir("/proc/self/fd")))
        driver.fail_at = 2
        with pytest.raises(RegistrationError, match="INJECTED"):
            engine.register([Region(arena.base, 12 * MIB)])
        assert engine.regions == ()
        assert (engine.describe(), len(os.listdir("/proc/self/fd"))) == before
        engine.register([Region(arena.base, 12 * MIB)])


def until_gone(engine: SameHostEngine, peer: str) -> None:
    """Wait until a peer has been let go."""
    deadline = time.monotonic() + 10
    with contextlib.suppress(TransferFailed):
        while engine.peer(peer).gone is None and time.monotonic() < deadline:
            time.sleep(0.005)


def test_a_device_that_cannot_map_the_receivers_memory_is_refused_with_its_reason(
    make_sender: Callable[..., SameHost], receiver: RemoteHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopier, "can_reach", lambda _self, _identity: False)
    pusher = make_sender()
    with pytest.raises(HandleImportError, match="our device cannot access the peer's"):
        pusher.engine.connect(receiver.describe())
    # The receiver hears of it through the socket.
    deadline = time.monotonic() + 10
    while receiver.process.call("attached") and time.monotonic() < deadline:
        time.sleep(0.005)
    assert receiver.process.call("attached") == ()
