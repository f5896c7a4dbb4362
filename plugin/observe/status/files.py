"""Status files: one for each process, in a directory that only its user can enter."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.config import Settings
from kvarena.plugin.observe.status.identity import condition_of
from kvarena.plugin.observe.status.model import FORMAT, ProcessStatus

__all__ = ["Found", "StatusFile", "directory_of", "exists", "find"]

_SUFFIX = ".status.json"
#: A status file is some tens of KiB; whatever is larger is none.
_MAX_BYTES = 8 << 20

State = Literal["running", "dead", "elsewhere", "unreadable"]


@dataclass(frozen=True)
class Found:
    """A status file, and what became of its process."""

    path: Path
    state: State
    """``"elsewhere"``: written in another container, whose processes cannot be seen from here."""
    status: ProcessStatus | None = None
    why: str = ""
    """Of an unreadable file."""

    @property
    def age_s(self) -> float:
        """Seconds since it was written."""
        return 0.0 if self.status is None else max(0.0, time.time() - self.status.written_at)


def directory_of(settings: Settings) -> Path:
    """Where this user's status files lie: ``KVARENA_SOCKET_DIR``, or the directory of the sockets."""
    from kvarena.transfer.same_host.socket_path import default_directory

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

    Parameters
    ----------
    directory : Path
        Made with mode 0700 if it is not there.
    serial : int
        Tells several pools of one process apart.

    Raises
    ------
    KvArenaError
        The directory belongs to somebody else, is open to others, or cannot be made.
    """

    def __init__(self, directory: Path, serial: int = 0) -> None:
        _check(directory, create=True)
        self.path = directory / f"{os.getpid()}-{serial}{_SUFFIX}"

    def write(self, status: ProcessStatus) -> None:
        """Replace the file.

        Raises
        ------
        OSError
            The disk is full, or the directory has gone; the old contents stay.
        """
        # mkstemp makes it with mode 0600; the suffix keeps half a file out of sight of readers.
        fd, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.", suffix=".part")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(status))
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def remove(self) -> None:
        """Take it away; a second call does nothing."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def find(directory: Path, *, clean: bool = True) -> list[Found]:
    """Every status file, in the order of process numbers.

    Parameters
    ----------
    directory : Path
        One that is not there holds none.
    clean : bool
        Whether to remove the files of processes that have died without removing them.

    Raises
    ------
    KvArenaError
        The directory belongs to somebody else, or is open to others: what lies there cannot be trusted.
        Or it cannot be read.
    """
    if not exists(directory):
        return []
    _check(directory)
    try:
        found = [_read(path) for path in _status_files(directory)]
    except OSError as error:
        raise KvArenaError(
            f"the status files in {directory} cannot be listed: {error.strerror}.",
            fix=f"chmod 0700 {directory}",
        ) from error
    for each in found if clean else ():
        if each.state == "dead":
            with contextlib.suppress(OSError):
                each.path.unlink()
    if clean:
        _remove_leftovers(directory)
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


def _read(path: Path) -> Found:
    try:
        contents = _contents(path)
        # Of another format nothing else is known.
        about = msgspec.json.decode(contents, type=_Format)
        if about.format != FORMAT:
            return Found(path, "unreadable", why=f"format {about.format}, this kvarena reads {FORMAT}")
        status = msgspec.json.decode(contents, type=ProcessStatus)
    except OSError as error:
        return Found(path, "unreadable", why=error.strerror or str(error))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Found(path, "unreadable", why=f"no status of a kvarena process ({error})")
    return Found(path, condition_of(status.identity), status)


def _contents(path: Path) -> bytes:
    # Neither a link to somewhere else, nor a pipe that would make the reader wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
            raise OSError(0, "no file of a few KiB")
        if about.st_uid != os.geteuid():
            raise OSError(0, f"belongs to user {about.st_uid}")
        return file.read(_MAX_BYTES)


def _check(directory: Path, *, create: bool = False) -> None:
    from kvarena.transfer.same_host.socket_path import check_directory

    try:
        check_directory(directory, create=create)
    except KvArenaError as error:
        raise KvArenaError(
            f"status files cannot be kept in {directory}: {error.what}",
            fix=error.fix,
        ) from error
