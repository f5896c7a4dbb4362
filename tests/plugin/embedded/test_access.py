"""Who may speak on a control channel, and how much: strangers, floods, and what they are told."""

from __future__ import annotations

import logging
import os
import resource
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from kvarena.errors import DescriptorLimitError
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.embedded import control, link
from kvarena.plugin.engines.embedded.access import (
    Access,
    AddressInUse,
    ControlRefused,
    control_endpoint,
    local_endpoint,
    new_secret,
)
from kvarena.plugin.engines.embedded.codec import Codec, MessageTooLarge
from kvarena.plugin.engines.embedded.control import TO_DECODE, TO_PREFILL, Ping
from kvarena.plugin.engines.embedded.decode import DecodeServer
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.link import Hub, Spoke
from kvarena.transfer import SocketPathError

SECRET = Access(new_secret())


def _hub(endpoint: str = "127.0.0.1", access: Access = SECRET) -> Hub:
    return Hub(endpoint, access=access, codec=Codec(TO_PREFILL, TO_DECODE))


def _spoke(hub: Hub, access: Access = SECRET, identity: bytes | None = b"one") -> Spoke:
    return Spoke(hub.address, identity, access=access, codec=Codec(TO_DECODE, TO_PREFILL))


def _hear(hub: Hub, seconds: float = 30.0) -> list[tuple[bytes, control.Message]]:
    end = time.monotonic() + seconds
    heard: list[tuple[bytes, control.Message]] = []
    while not heard and time.monotonic() < end:
        heard = hub.receive(0.1)
    return heard


def test_on_one_host_it_is_a_socket_in_an_owner_only_directory(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = Settings(socket_dir=str(directory))
    with _hub(control_endpoint(settings)) as hub:
        assert hub.address.startswith(f"ipc://{directory}/")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with _spoke(hub, Access()) as spoke:
            spoke.send(Ping())
            assert _hear(hub) == [(b"one", Ping())]
    assert list(directory.iterdir()) == []


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o755)
    with pytest.raises(SocketPathError, match="0755"):
        local_endpoint(Settings(socket_dir=str(directory)))


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AddressInUse, match="KVARENA_SOCKET_DIR"):
        local_endpoint(Settings(socket_dir=str(tmp_path / ("x" * 100))))


def test_sockets_of_dead_processes_are_removed_and_live_ones_stay(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    settings = Settings(socket_dir=str(tmp_path))
    dead = tmp_path / "control-1-abcdef.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    with _hub(local_endpoint(settings)) as hub:
        live = Path(hub.address.removeprefix("ipc://"))
        local_endpoint(settings)
        assert not dead.exists()
        assert live.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.0.2.1", "::", "example.invalid"])
def test_tcp_without_a_secret_is_refused(host: str) -> None:
    with pytest.raises(ControlRefused, match="secret"):
        _hub(host, Access())
    with pytest.raises(ControlRefused, match="secret"):
        Spoke(f"tcp://{host}:5555", access=Access())


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.invalid"])
def test_insecure_is_refused_beyond_loopback(host: str) -> None:
    with pytest.raises(ControlRefused, match="other hosts"):
        _hub(host, Access(insecure=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("access", [SECRET, Access(insecure=True)])
def test_loopback_addresses_carry_messages(host: str, access: Access) -> None:
    with _hub(host, access) as hub, _spoke(hub, access) as spoke:
        assert hub.keeps_strangers_out is bool(access.secret)
        spoke.send(Ping())
        assert _hear(hub) == [(b"one", Ping())]
        assert hub.send(b"one", Ping())
        assert spoke.receive(30.0) == [Ping()]


@pytest.mark.parametrize("access", [Access(new_secret()), Access(insecure=True)])
def test_a_stranger_is_neither_heard_nor_answered(access: Access) -> None:
    with _hub() as hub, _spoke(hub, access, b"stranger") as stranger, _spoke(hub) as friend:
        for _ in range(10):
            stranger.send(control.Join(b"", ""))
        friend.send(Ping())
        assert _hear(hub) == [(b"one", Ping())]
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert hub.receive(0.05) == []
        assert stranger.receive() == []
        assert set(hub.last_heard) == {b"one"}


def test_a_refusal_tells_a_stranger_nothing(make_engine: Callable[..., Engine]) -> None:
    said: list[control.Message] = []
    access = Access(insecure=True)
    server = DecodeServer(make_engine(), said.append, endpoint="127.0.0.1", access=access)
    try:
        with _spoke(server.hub, access) as stranger:
            stranger.send(control.Join(b"", '{"seed": 7}'))
            answer: list[control.Message] = []
            end = time.monotonic() + 30
            while not answer and time.monotonic() < end:
                server.step()
                answer = stranger.receive(0.01)
    finally:
        server.close()
    (told,) = answer
    assert isinstance(told, control.Refused)
    for word in ("seed", "layer", "page", "hidden", "recording"):
        assert word not in told.what
    (logged,) = (message for message in said if isinstance(message, control.Refused))
    assert "seed" in logged.what


def test_a_turn_takes_a_bounded_number_of_messages() -> None:
    with _hub() as hub, _spoke(hub) as flooder:
        for _ in range(1000):
            flooder.send(Ping())
        heard = _hear(hub)
        while len(heard) < 1000:
            turn = hub.receive(5.0)
            assert 0 < len(turn) <= 128
            heard += turn
        assert len(heard) == 1000


def test_a_message_beyond_the_limit_ends_its_connection_and_nobody_elses() -> None:
    with _hub() as hub, _spoke(hub, identity=b"large") as large, _spoke(hub) as other:
        large.raw.send(bytes(TO_DECODE.max_bytes + 1))
        large.raw.send(Codec(TO_DECODE, TO_PREFILL).encode(Ping()))
        other.send(Ping())
        heard = _hear(hub)
        while (b"one", Ping()) not in heard:
            heard += _hear(hub)
        assert hub._codec.dropped == 0


def test_what_a_receiver_would_not_take_is_not_sent() -> None:
    with _hub() as hub, _spoke(hub) as spoke, pytest.raises(MessageTooLarge, match="Refused"):
        spoke.send(control.Refused("x" * TO_DECODE.max_bytes))


@pytest.mark.parametrize("message", [control.Stop(), control.Generate, control.Welcome(b"", "")])
def test_a_message_of_another_direction_is_dropped(message: object) -> None:
    if message is control.Generate:
        from kvarena.plugin.engines.embedded.requests import Request

        message = control.Generate(Request(1, [1], 1))
    codec = Codec(TO_PREFILL, TO_DECODE)
    anything = Codec(control.Channel("anything", control.Message, 1 << 20, 1), TO_DECODE)
    assert codec.decode([anything.encode(message)]) is None  # type: ignore[arg-type]
    assert codec.dropped == 1


def test_warnings_about_dropped_messages_have_a_rate(caplog: pytest.LogCaptureFixture) -> None:
    codec = Codec(TO_PREFILL, TO_DECODE)
    with caplog.at_level(logging.WARNING):
        for bad in (b"\xc1", b"\x1b[31m", b"\xa3\xed\xa0\x80", b"") * 1000:
            assert codec.decode([bad]) is None
    assert codec.dropped == 4000
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is None


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("make", [_hub, lambda: Spoke("tcp://127.0.0.1:1", access=SECRET)])
def test_at_the_descriptor_limit_the_error_names_it_and_nothing_is_left(make: Callable[[], Hub]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = _open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 8, hard))
    try:
        with pytest.raises(DescriptorLimitError, match="RLIMIT_NOFILE"):
            make()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert _open_descriptors() == before


def test_a_server_whose_construction_fails_leaves_nothing(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvarena.plugin.engines.embedded import decode

    engine = make_engine()
    engine.lifecycle.reporter.close()  # it writes a file now and then, which has a draft beside it
    before = _open_descriptors(), sorted(tmp_path.iterdir())

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(decode, "Arrivals", fail)
    with pytest.raises(OSError, match="Too many"):
        DecodeServer(engine, lambda message: None)
    assert (_open_descriptors(), sorted(tmp_path.iterdir())) == before


@pytest.mark.parametrize("step", ["curve_keypair", "get_monitor_socket", "connect"])
def test_a_spoke_whose_construction_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    before = _open_descriptors()

    def fail(*_: object) -> None:
        raise zmq.ZMQError(zmq.ENOTSUP)

    monkeypatch.setattr(zmq if step == "curve_keypair" else zmq.Socket, step, fail)
    with pytest.raises((zmq.ZMQError, AddressInUse)):
        Spoke("tcp://127.0.0.1:1", access=SECRET)
    assert _open_descriptors() == before


def test_signs_of_life_go_on_while_the_servers_thread_waits() -> None:
    assert link._MAX_TURN == 128
    with _hub() as hub, _spoke(hub) as spoke:
        spoke.send(Ping())
        assert _hear(hub)
        with hub.kept_alive(0.02):
            time.sleep(0.5)
        heard = spoke.receive(1.0)
        assert len(heard) >= 5
