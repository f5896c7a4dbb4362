"""Who is dead, who lives where it cannot be seen, and what of either may be removed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from kvarena.plugin.commands.status.view import render
from kvarena.plugin.observe.status.files import StatusFile, clean, find
from kvarena.plugin.observe.status.identity import identity
from kvarena.plugin.observe.status.model import EngineStatus, PoolStatus, ProcessStatus
from kvarena.transfer.same_host.sockets import listen
from rich.console import Console

WRITER = """
import os, signal, sys, time
from pathlib import Path
from kvarena.plugin.observe.status.files import StatusFile
from kvarena.plugin.observe.status.identity import identity
from kvarena.plugin.observe.status.model import PoolStatus, ProcessStatus
pool = PoolStatus(state="serving")
status = ProcessStatus(identity=identity(), name="victim", written_at=time.time(), pool=pool)
file = StatusFile(Path(sys.argv[1]))
file.write(status)
print("written", flush=True)
"""
KILL = """
from kvarena.transfer.same_host.sockets import fresh_name, listen
kept = listen(Path(sys.argv[1]), fresh_name())
os.kill(os.getpid(), signal.SIGKILL)
"""


def _status(**changes: object) -> ProcessStatus:
    identity_ = msgspec.structs.replace(identity(), **changes)
    return ProcessStatus(identity=identity_, name="forged", written_at=0.0, pool=PoolStatus(state="serving"))


def _states(directory: Path) -> list[str]:
    return [found.state for found in find(directory)]


def _said(directory: Path) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render(find(directory), directory))
    return out.getvalue()


@pytest.fixture
def ours(directory: Path) -> StatusFile:
    return StatusFile(directory)


def test_a_file_of_another_boot_or_host_is_left_alone(directory: Path, ours: StatusFile) -> None:
    # A directory on a network file system is another host's as well, which has booted at another time.
    ours.write(_status(boot_id="another boot"))
    ours.let_go()
    assert _states(directory) == ["elsewhere"]
    assert clean(directory) == []
    assert ours.path.exists()


def test_a_live_process_of_another_time_namespace_is_left_alone(directory: Path, ours: StatusFile) -> None:
    # There /proc shows the same process with another start.
    ours.write(_status(time_namespace=1, started=1))
    assert _states(directory) == ["elsewhere"]
    assert ours.path.exists()


def test_a_dead_process_of_another_container_is_known_by_its_lock(directory: Path, ours: StatusFile) -> None:
    ours.write(_status(pid_namespace=1, pid=1))
    assert _states(directory) == ["elsewhere"]
    ours.let_go()  # as the kernel does when a process ends
    assert _states(directory) == ["dead"]
    assert not ours.path.exists()


def test_a_file_without_a_lock_of_another_container_is_left_alone(
    directory: Path, ours: StatusFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", no_locks)
        ours.write(_status(pid_namespace=1, pid=1))
    assert _states(directory) == ["elsewhere"]


def test_equal_numbers_in_two_containers_have_two_files(directory: Path) -> None:
    first, second = StatusFile(directory), StatusFile(directory)  # of one process number
    first.write(_status(pid_namespace=1))
    second.write(_status(pid_namespace=2))
    assert len(find(directory)) == 2
    second.remove()
    assert [found.path for found in find(directory)] == [first.path]


def test_a_forked_child_leaves_the_file_to_its_parent(directory: Path, ours: StatusFile) -> None:
    ours.write(_status())
    before = ours.path.read_bytes()
    child = os.fork()
    if not child:
        ours.write(_status(pid=1))
        ours.remove()
        os._exit(ours._held is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert ours.path.read_bytes() == before


def test_the_next_process_removes_what_killed_ones_left(directory: Path) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", WRITER + KILL, str(directory)]
        assert subprocess.run(command, stdout=subprocess.PIPE, timeout=60).returncode == -signal.SIGKILL
    assert {path.name.partition(".")[2] for path in directory.iterdir()} == {"status.json", "sock"}
    assert len(clean(directory)) == 3
    assert list(directory.iterdir()) == []


def test_a_socket_is_asked_whether_it_lives_whatever_its_number(directory: Path) -> None:
    server, path = listen(directory, "1-abcdef")
    with server:
        clean(directory)
        assert path.exists()
    # Every container has a number 1: it says nothing about whose socket this was.
    clean(directory)
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root here")
@pytest.mark.parametrize(
    "namespace",
    [["--pid", "--mount-proc"], ["--time", "--boottime", "100000"]],
    ids=["container", "time namespace"],
)
def test_a_process_of_a_real_namespace_lives_and_dies(directory: Path, namespace: list[str]) -> None:
    unshare = ["unshare", "--fork", "--kill-child", *namespace]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no such namespaces here")
    writer = subprocess.Popen(
        [*unshare, sys.executable, "-c", WRITER + "time.sleep(600)", str(directory)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        assert _states(directory) == ["elsewhere"]
    finally:
        writer.kill()
        writer.communicate()
    deadline = time.monotonic() + 20
    while (state := find(directory, remove_dead=False)[0].state) != "dead" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert state == "dead"


def test_a_forged_file_writes_no_line_of_its_own(directory: Path, ours: StatusFile) -> None:
    forged = "x\n\x1b[2Jdecode  pid 1  serving\u202e"
    engine = EngineStatus(name=forged, registered_bytes=0, regions=(), epoch=0, in_flight=0)
    pool = PoolStatus(state="serving", reserved_bytes=1, device=forged, engines=(engine,))
    ours.write(
        msgspec.structs.replace(_status(), name=forged, pool=pool, refusals=(forged,), metrics_address=forged)
    )
    (directory / "7-\x1b[31m.status.json").write_text('{"format": 1, "pool": {"state": "a\\nb"}}')
    said = _said(directory)
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert [line for line in said.splitlines() if line.startswith("decode")] == []
    assert "x\\n\\x1b[2Jdecode" in said


def test_a_worker_that_went_with_its_parent_did_not_die(directory: Path, ours: StatusFile) -> None:
    ours.write(_status(started=1, parent_started=1))
    assert "has ended with its parent" in _said(directory)


def test_a_worker_whose_parent_lives_has_died(directory: Path, ours: StatusFile) -> None:
    ours.write(_status(started=1))
    assert "has died without closing" in _said(directory)


def test_deep_nesting_is_not_a_status(directory: Path, ours: StatusFile) -> None:
    ours.path.write_bytes(b'{"format": 1, "x": ' + b"[" * 100_000)
    assert _states(directory) == ["unreadable"]
