"""A directory that only this user can enter, and files in it that are replaced as a whole.

Sockets, status files and SGLang's cards lie there: who can enter it is trusted with all of them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from kvarena.transfer.errors import SocketPathError

__all__ = ["check_directory", "default_directory", "write_atomically"]

_OWN_DIRECTORY = "Set KVARENA_SOCKET_DIR to a directory of your own with mode 0700."


def default_directory() -> Path:
    """``$XDG_RUNTIME_DIR/kvarena``, or ``/tmp/kvarena-<uid>`` where that is not set."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvarena" if runtime else Path(f"/tmp/kvarena-{os.geteuid()}")


def check_directory(directory: Path, *, create: bool = False) -> None:
    """Raise `SocketPathError` unless `directory` is ours, real, and closed to everyone else."""
    _check_ancestors(directory)
    if create:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            # mkdir's mode is cut by the umask, never widened.
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            why = f"cannot be made ({error.strerror})"
            raise SocketPathError(str(directory), why, fix=_OWN_DIRECTORY) from error
    try:
        found = os.lstat(directory)
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise SocketPathError(str(directory), why, fix=_OWN_DIRECTORY) from error
    if not stat.S_ISDIR(found.st_mode):
        raise SocketPathError(str(directory), "is no directory", fix=_OWN_DIRECTORY)
    if found.st_uid != os.geteuid():
        raise SocketPathError(
            str(directory),
            f"belongs to user {found.st_uid}, we are {os.geteuid()}",
            fix=_OWN_DIRECTORY,
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise SocketPathError(
            str(directory),
            f"has mode {mode:04o}, others can enter it",
            fix=f"chmod 0700 {directory}" if _holds_ours_alone(directory) else _OWN_DIRECTORY,
        )


def _holds_ours_alone(directory: Path) -> bool:
    """Whether closing a directory harms nobody: of /tmp or /var/run, which root owns, it would."""
    try:
        return (
            not os.path.ismount(directory)
            and all(
                name.endswith((".sock", ".status.json", ".card.json", ".part"))
                for name in os.listdir(directory)
            )
            and not os.lstat(directory).st_mode & (stat.S_ISVTX | stat.S_IWOTH)
        )
    except OSError:
        return False


def _check_ancestors(directory: Path) -> None:
    """Whoever may rename a directory above ours can put another one, or a link, in its place."""
    above = Path(os.path.abspath(directory)).parents
    real = Path(os.path.realpath(above[0])) if above else Path("/")
    for each in {*above, real, *real.parents}:
        try:
            found = os.lstat(each)
        except OSError:
            continue  # it is to be made, or making it will say what is wrong
        mode = stat.S_IMODE(found.st_mode)
        shared = stat.S_ISDIR(found.st_mode) and mode & 0o022 and not mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or shared:
            why = (
                f"lies below {each}, which user {found.st_uid} owns and which has mode {mode:04o}: "
                "others can replace it"
            )
            raise SocketPathError(str(directory), why, fix=_OWN_DIRECTORY)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as a whole: readers see the old contents or the new ones. Its mode is 0600.

    Parameters
    ----------
    path : Path
        In a directory that `check_directory` accepts. The draft beside it is called ``.<name>.*.part``.

    Raises
    ------
    OSError
        The disk is full, or the directory has gone; the old contents stay.
    """
    # mkstemp makes it with mode 0600, and follows no link.
    fd, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
