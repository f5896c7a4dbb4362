"""Records of same-host sessions: found by name, believed only if they are ours; needs no SGLang."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from kvarena.plugin.engines.sglang.same_host.session_file import (
    SessionRecord,
    is_this_host,
    name_of,
    path_of,
    read,
    version_of,
)
from kvarena.transfer import Region

SESSION = "127.0.0.1:15000"


def record(identity: str = "a", session: str = SESSION) -> SessionRecord:
    return SessionRecord.of(session, identity, b"{}", (Region(4096, 8192),))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, SESSION) is None
    assert version_of(tmp_path, SESSION) is None
    record().write(tmp_path)
    assert read(tmp_path, SESSION) == record()
    assert record().connection() == b"{}"
    assert [path.name for path in tmp_path.iterdir()] == [path_of(tmp_path, SESSION).name]
    assert path_of(tmp_path, SESSION).stat().st_mode & 0o777 == 0o600


def test_a_new_record_is_a_new_version_of_the_file(tmp_path: Path) -> None:
    record().write(tmp_path)
    before = version_of(tmp_path, SESSION)
    assert version_of(tmp_path, SESSION) == before
    record().write(tmp_path)
    assert version_of(tmp_path, SESSION) != before


def test_a_successors_record_is_left_alone(tmp_path: Path) -> None:
    record("a").write(tmp_path)
    record("b").write(tmp_path)
    record("a").remove(tmp_path)
    assert read(tmp_path, SESSION) == record("b")
    record("b").remove(tmp_path)
    record("b").remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_that_a_crash_left_is_no_obstacle(tmp_path: Path) -> None:
    path_of(tmp_path, SESSION).with_suffix(".a.tmp").write_text("half")
    record("a").write(tmp_path)
    assert read(tmp_path, SESSION) == record("a")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"session": 1}', b"\xff" * 64, b" " * (2 << 20)],
    ids=["empty", "cut", "list", "types", "binary", "huge"],
)
def test_a_file_that_makes_no_sense_is_not_a_record(tmp_path: Path, content: bytes) -> None:
    path_of(tmp_path, SESSION).write_bytes(content)
    assert read(tmp_path, SESSION) is None


def test_another_sessions_record_or_version_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(session="127.0.0.1:15001").write(tmp_path)
    os.rename(path_of(tmp_path, "127.0.0.1:15001"), path_of(tmp_path, SESSION))
    assert read(tmp_path, SESSION) is None
    assert "127.0.0.1:15001" in caplog.text


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    record().write(elsewhere)
    path_of(tmp_path, SESSION).symlink_to(path_of(elsewhere, SESSION))
    assert read(tmp_path, SESSION) is None
    path_of(tmp_path, SESSION).unlink()
    os.mkfifo(path_of(tmp_path, SESSION))
    assert read(tmp_path, SESSION) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_record_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record().write(tmp_path)
    os.chown(path_of(tmp_path, SESSION), 65534, 65534)
    assert read(tmp_path, SESSION) is None
    assert "is no file of user 0" in caplog.text


def test_names_are_short_safe_and_different() -> None:
    sessions = [
        "127.0.0.1:15000",
        "127.0.0.1:15001",
        "10.0.0.1:15000",
        "[fe80::1%eth0]:15000",
        "h/../x:1",
        "?",
    ]
    sessions += ["a" * 250 + ":1"]
    names = {name_of(session) for session in sessions}
    assert len(names) == len(sessions)
    assert all(len(name) < 32 and name.replace("-", "").isalnum() for name in names)


@pytest.mark.parametrize(
    ("session", "here"),
    [
        ("127.0.0.1:1", True),
        ("localhost:15000", True),
        ("192.0.2.77:15000", False),  # RFC 5737: nobody's
        ("0.0.0.0:15000", False),
        ("no-such-host.invalid:15000", False),
        (":15000", False),
        ("nonsense", False),
        ("x" * 300 + ":1", False),
    ],
)
def test_only_this_machines_addresses_are_here(session: str, here: bool) -> None:
    assert is_this_host(session) is here


def test_ipv6_sessions_are_in_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback")
    assert is_this_host("[::1]:15000")
    assert not is_this_host("[2001:db8::77]:15000")  # RFC 3849: nobody's
