"""Status files of the living, the dead, the replaced and the forged."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from kvarena.errors import KvArenaError
from kvarena.plugin.commands.status.view import render
from kvarena.plugin.observe.status.files import StatusFile, find
from kvarena.plugin.observe.status.identity import identity
from kvarena.plugin.observe.status.model import PoolStatus, ProcessIdentity, ProcessStatus
from rich.console import Console

WRITER = """
import sys, time
from pathlib import Path
from kvarena.plugin.observe.status.files import StatusFile
from kvarena.plugin.observe.status.identity import identity
from kvarena.plugin.observe.status.model import PoolStatus, ProcessStatus
pool = PoolStatus(state="serving")
status = ProcessStatus(identity=identity(), name="victim", written_at=time.time(), pool=pool)
StatusFile(Path(sys.argv[1])).write(status)
print("written", flush=True)
time.sleep(600)
"""


def _status(**changes: object) -> ProcessStatus:
    identity_ = msgspec.structs.replace(identity(), **changes)
    return ProcessStatus(identity=identity_, name="forged", written_at=0.0, pool=PoolStatus(state="serving"))


@pytest.fixture
def ours(directory: Path) -> StatusFile:
    return StatusFile(directory)


def test_a_killed_process_is_reported_once_and_its_file_cleaned(directory: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        (found,) = find(directory)
        assert (found.state, found.status and found.status.identity.pid) == ("running", writer.pid)
        writer.send_signal(signal.SIGKILL)
        # A zombie until its parent has waited: dead all the same.
        while (state := find(directory, remove_dead=False)[0].state) == "running":
            pass
        assert state == "dead"
    finally:
        writer.kill()
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()
    (found,) = find(directory)
    assert (found.state, found.status and found.status.name) == ("dead", "victim")
    assert find(directory) == []


def test_another_process_with_the_same_number_is_not_taken_for_it(directory: Path, ours: StatusFile) -> None:
    ours.write(_status(started=identity().started - 1))
    (found,) = find(directory)
    assert found.state == "dead"
    assert not ours.path.exists()


def test_a_process_of_another_container_is_left_alone(directory: Path, ours: StatusFile) -> None:
    # Its number may be anybody's here: whether it lives cannot be told, so its file must stay.
    ours.write(_status(pid_namespace=1, pid=999_999_999))
    assert [found.state for found in find(directory)] == ["elsewhere"]
    assert ours.path.exists()


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (b"", "not a status of a kvarena process"),
        (b"{", "not a status of a kvarena process"),
        (b"[1, 2]", "not a status of a kvarena process"),
        (b'{"format": 1}', "not a status of a kvarena process"),
        (b"\xff\xfe\x00", "not a status of a kvarena process"),
        (b" " * ((8 << 20) + 1), "not a file of a few KiB"),
    ],
    ids=["empty", "cut off", "a list", "fields missing", "binary", "too large"],
)
def test_what_cannot_be_read_is_named_and_kept(
    directory: Path, ours: StatusFile, contents: bytes, why: str
) -> None:
    ours.path.write_bytes(contents)
    (found,) = find(directory)
    assert (found.state, found.status) == ("unreadable", None)
    assert why in found.why
    assert ours.path.exists()


def test_another_format_is_named(directory: Path, ours: StatusFile) -> None:
    ours.write(msgspec.structs.replace(_status(), format=2))
    (found,) = find(directory)
    assert (found.state, found.why) == ("unreadable", "format 2, this kvarena reads 1")


def test_another_format_is_named_whatever_its_shape(directory: Path, ours: StatusFile) -> None:
    ours.path.write_bytes(b'{"format": 2, "process": 4711}')
    (found,) = find(directory)
    assert (found.state, found.why) == ("unreadable", "format 2, this kvarena reads 1")


def test_sizes_below_nothing_are_no_status(directory: Path, ours: StatusFile) -> None:
    ours.write(msgspec.structs.replace(_status(), pool=PoolStatus(state="serving", backed_bytes=-1)))
    (found,) = find(directory)
    assert found.state == "unreadable"
    assert "backed_bytes" in found.why


def test_an_active_size_beyond_the_reservation_fills_the_bar_and_no_more(
    directory: Path, ours: StatusFile
) -> None:
    # A bar of that many cells would take all memory.
    pool = PoolStatus(state="serving", reserved_bytes=1, active_bytes=1 << 62)
    ours.write(msgspec.structs.replace(_status(), pool=pool))
    out = io.StringIO()
    Console(file=out, width=200).print(render(find(directory), directory))
    assert out.getvalue().count("░") == 60


def test_links_pipes_and_folders_are_not_followed(directory: Path, ours: StatusFile, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_bytes(msgspec.json.encode(_status()))
    (directory / "1-0.status.json").symlink_to(real)
    os.mkfifo(directory / "2-0.status.json")
    (directory / "3-0.status.json").mkdir()
    assert [found.state for found in find(directory)] == ["unreadable"] * 3


def test_a_directory_that_others_can_enter_is_not_believed(directory: Path, ours: StatusFile) -> None:
    directory.chmod(0o755)
    with pytest.raises(KvArenaError, match=r"chmod 0700"):
        find(directory)


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert find(tmp_path / "nowhere") == []


@pytest.mark.parametrize("name", ["loop/kvarena", "x" * 300])
def test_a_directory_that_cannot_be_looked_at_is_an_error(tmp_path: Path, name: str) -> None:
    # As with the XDG_RUNTIME_DIR of another user, which root could enter.
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(KvArenaError, match="status files cannot be kept") as info:
        find(tmp_path / name)
    assert info.value.fix.startswith("Set KVARENA_SOCKET_DIR")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_its_owner_cannot_list_is_an_error(directory: Path, ours: StatusFile) -> None:
    directory.chmod(0)
    try:
        with pytest.raises(KvArenaError, match="cannot be listed"):
            find(directory)
    finally:
        directory.chmod(0o700)


def test_a_failed_write_leaves_the_old_file_and_no_halves(directory: Path, ours: StatusFile) -> None:
    ours.write(_status())
    before = ours.path.read_bytes()
    with pytest.raises(TypeError):
        ours.write(msgspec.structs.replace(_status(), name=object()))  # cannot be encoded
    assert ours.path.read_bytes() == before
    assert list(directory.iterdir()) == [ours.path]


def test_a_reader_never_sees_half_a_file(directory: Path, ours: StatusFile) -> None:
    ours.write(_status())
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            ours.write(_status())

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = {found.state for _ in range(300) for found in find(directory, remove_dead=False)}
    finally:
        stop.set()
        thread.join()
    assert seen == {"running"}


def test_an_identity_is_this_process() -> None:
    mine = identity()
    assert mine.pid == os.getpid()
    assert isinstance(mine, ProcessIdentity)
    assert mine.started > 0
