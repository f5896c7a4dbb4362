"""Status files: one for each process, in a directory that only its user can enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.config import Settings
from kvarena.plugin.observe.status.identity import condition_of
from kvarena.plugin.observe.status.model import FORMAT, ProcessStatus

__all__ = ["Found", "StatusFile", "check_status_directory", "clean", "directory_of", "exists", "find"]

_SUFFIX = ".status.json"
#: A status file is some tens of KiB; whatever is larger is something else.
_MAX_BYTES = 8 << 20

State = Literal["running", "dead", "elsewhere", "unreadable"]


@dataclass(frozen=True)
class Found:
    """A status file, and what became of its process."""

    path: Path
    state: State
    """``"elsewhere"``: of another container or host, whose processes cannot be seen from here."""
    status: ProcessStatus | None = None
    why: str = ""
    """Of an unreadable file."""

    @property
    def age_s(self) -> float:
        """Seconds since it was written."""
        return 0.0 if self.status is None else max(0.0, time.time() - self.status.written_at)


def directory_of(settings: Settings) -> Path:
    """Where this user's status files lie: ``KVARENA_SOCKET_DIR``, or the directory of the sockets."""
    from kvarena.transfer.owner_only import default_directory

    return Path(settings.socket_dir) if settings.socket_dir else default_directory()


def exists(directory: Path) -> bool:
    """Whether anything is there, be it a broken link; also where that cannot be told.

    ``XDG_RUNTIME_DIR`` of another user (``sudo -u``) does not let us look: `check_directory` then says why.
    """
    try:
        os.lstat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


class StatusFile:
    """The file of the calling process, replaced as a whole with each write.

    Its name is nobody else's, so that containers that share a directory, where process numbers repeat, do not
    write over or remove each other's. The process holds a lock on it, whose end proves its own, across
    containers too.

    Parameters
    ----------
    directory : Path
        Made with mode 0700 if it is not there.

    Raises
    ------
    KvArenaError
        The directory belongs to somebody else, is open to others, or cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        check_status_directory(directory, create=True)
        self._pid = os.getpid()
        self._held: int | None = None
        self.path = directory / f"{self._pid}-{secrets.token_hex(6)}{_SUFFIX}"
        _files.add(self)

    def write(self, status: ProcessStatus) -> None:
        """Replace the file; a directory that has gone is made again. In a forked child this does nothing.

        Raises
        ------
        KvArenaError
            The directory is no longer ours alone, or cannot be made again.
        OSError
            The disk is full, for example; the old contents stay.
        """
        if os.getpid() != self._pid:
            return
        try:
            self._replace(status)
        except FileNotFoundError:
            check_status_directory(self.path.parent, create=True)
            self._replace(status)

    def remove(self) -> None:
        """Take it away; a second call does nothing, nor does one in a forked child."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.let_go()

    def let_go(self) -> None:
        """Close this process's copy of the lock."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def _replace(self, status: ProcessStatus) -> None:
        # mkstemp makes it with mode 0600; the suffix keeps half a file out of sight of readers.
        fd, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.", suffix=".part")
        try:
            status = msgspec.structs.replace(status, locked=_lock(fd))
            with open(fd, "wb", closefd=False) as file:
                file.write(msgspec.json.encode(status))
            os.replace(temporary, self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.let_go()
        self._held = fd


#: A forked child has copies of the locks, and would keep them when its parent has died.
_files: weakref.WeakSet[StatusFile] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for each in list(_files):
        each.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


def _lock(fd: int) -> bool:
    """Lock an open file for as long as it is open; False: this filesystem has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def clean(directory: Path) -> list[Found]:
    """Remove what dead processes left in a directory that is ours: status files, halves of them, sockets.

    Returns
    -------
    list of Found
        Whose status files are removed.
    """
    dead = []
    for path in _status_files(directory):
        found = _read(path)
        if found.state == "dead" and _remove(found):
            dead.append(found)
    _remove_leftovers(directory)
    _remove_dead_sockets(directory)
    return dead


def find(directory: Path, *, remove_dead: bool = True) -> list[Found]:
    """Every status file, in the order of process numbers.

    Parameters
    ----------
    directory : Path
        One that is not there holds none.
    remove_dead : bool
        Whether to remove the files of processes that have died without removing them.

    Raises
    ------
    KvArenaError
        The directory belongs to somebody else, or is open to others: what lies there cannot be trusted.
        Or it cannot be read.
    """
    if not exists(directory):
        return []
    check_status_directory(directory)
    try:
        found = [_read(path) for path in _status_files(directory)]
    except OSError as error:
        raise KvArenaError(
            f"the status files in {directory} cannot be listed: {error.strerror}.",
            fix=f"chmod 0700 {directory}",
        ) from error
    if remove_dead:
        for each in found:
            if each.state == "dead":
                _remove(each)
        _remove_leftovers(directory)
        _remove_dead_sockets(directory)
    return sorted(found, key=lambda each: (each.status is None, each.status and each.status.identity.pid))


class _Format(msgspec.Struct):
    format: int = FORMAT


def _status_files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.name.endswith(_SUFFIX) and not path.name.startswith("."):
            yield path


def _remove_leftovers(directory: Path) -> None:
    """Halves of files whose writer was killed in between."""
    for path in directory.glob(f".*{_SUFFIX}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 60:
                path.unlink()


def _remove_dead_sockets(directory: Path) -> None:
    from kvarena.transfer.same_host.sockets import remove_dead_sockets

    with contextlib.suppress(OSError):
        remove_dead_sockets(directory)


def _remove(found: Found) -> bool:
    """Remove the file of a dead process; whoever comes second has removed nothing."""
    try:
        found.path.unlink()
    except OSError:
        return False
    return True


def _read(path: Path) -> Found:
    try:
        contents, lock_free = _contents(path)
        # Of another format nothing else is known.
        about = msgspec.json.decode(contents, type=_Format)
        if about.format != FORMAT:
            return Found(path, "unreadable", why=f"format {about.format}, this kvarena reads {FORMAT}")
        status = msgspec.json.decode(contents, type=ProcessStatus)
    except OSError as error:
        return Found(path, "unreadable", why=error.strerror or str(error))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Found(path, "unreadable", why=f"not a status of a kvarena process ({error})")
    return Found(path, condition_of(status.identity, lock_free=lock_free if status.locked else None), status)


def _contents(path: Path) -> tuple[bytes, bool]:
    """What a file holds, and whether nobody holds its lock."""
    # Neither a link to somewhere else, nor a pipe that would make the reader wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
            raise OSError(0, "not a file of a few KiB")
        if about.st_uid != os.geteuid():
            raise OSError(0, f"belongs to user {about.st_uid}")
        contents = file.read(_MAX_BYTES)
        # Shared, and only for this moment: readers do not stand in each other's way. A file that was replaced
        # meanwhile has no lock any more, and its writer lives.
        free = _lock_is_free(fd) and _is_still(path, about)
        return contents, free


def _lock_is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        return False
    return True


def _is_still(path: Path, about: os.stat_result) -> bool:
    try:
        return os.lstat(path).st_ino == about.st_ino
    except OSError:
        return False


def check_status_directory(directory: Path, *, create: bool = False) -> None:
    """Raise `KvArenaError` unless a directory is ours alone."""
    from kvarena.transfer.owner_only import check_directory

    try:
        check_directory(directory, create=create)
    except KvArenaError as error:
        raise KvArenaError(
            f"status files cannot be kept in {directory}: {error.what}",
            fix=error.fix,
        ) from error
