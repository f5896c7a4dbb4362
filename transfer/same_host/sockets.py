"""Where sockets live: a directory that only this user can enter, and names that only one engine holds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvarena.errors import KvArenaError
from kvarena.transfer.errors import SocketPathError
from kvarena.transfer.owner_only import check_directory
from kvarena.transfer.same_host.errors import PeerRefused
from kvarena.transfer.same_host.wire import peer_uid

__all__ = ["Listener", "dial", "fresh_name", "is_name", "listen", "remove_dead_sockets"]

# sun_path has 108 bytes and ends with a zero (unix(7)).
_PATH_BYTES = 107
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FRESH = re.compile(r"(\d+)-[0-9a-f]{6}\.sock")


def is_name(name: str) -> bool:
    """Whether an engine may be called that."""
    return _NAME.fullmatch(name) is not None


def fresh_name() -> str:
    """A name that no other engine has, nor will have."""
    return f"{os.getpid()}-{secrets.token_hex(3)}"


class Listener(NamedTuple):
    """A listening socket, and where it lies."""

    sock: socket.socket
    path: Path


def listen(directory: Path, name: str) -> Listener:
    """A listening socket called `name`; one that a dead process left there is taken over.

    What dead processes left under names of their own, which nobody takes over, is removed.

    Raises
    ------
    SocketPathError
        A bad name or directory, a path that is too long, something else of that name, or a live
        engine behind it.
    """
    if not is_name(name):
        raise SocketPathError(name, "is no name for a socket", fix="Use letters, digits, dots and dashes.")
    directory = Path(os.path.abspath(directory))  # peers, and we at the end, may be elsewhere
    path = directory / f"{name}.sock"
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise SocketPathError(
            str(path),
            f"has {len(os.fsencode(path))} bytes, {_PATH_BYTES} are the most",
            fix="Set KVARENA_SOCKET_DIR to a shorter path, or give a shorter name.",
        )
    check_directory(directory, create=True)
    with _locked(directory):
        _clear_the_way(path)
        _sweep(directory)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Of the socket itself, before it has a path: to change the mode by a path would follow links.
            os.fchmod(server.fileno(), 0o600)
            server.bind(str(path))
            server.listen(64)
        except OSError as error:
            server.close()
            raise SocketPathError(str(path), error.strerror or "cannot be bound") from error
    return Listener(server, path)


def remove_dead_sockets(directory: Path) -> None:
    """Remove the sockets under names of their own behind which nobody listens.

    Raises
    ------
    OSError
        The directory cannot be read.
    """
    with _locked(directory):
        _sweep(directory)


def dial(path: Path, timeout: float) -> socket.socket:
    """A socket connected to the engine at `path`, which runs as our user.

    Raises
    ------
    SocketPathError
        The socket, or its directory, belongs to someone else or is open to them.
    PeerRefused
        Nobody answers there, or another user's process does.
    """
    check_directory(path.parent)
    try:
        found = os.lstat(path)
    except OSError as error:
        raise PeerRefused(str(path), "unreachable", error.strerror or "no such socket") from error
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise SocketPathError(str(path), f"is no socket of user {os.geteuid()} (it is user {found.st_uid}'s)")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout)
        _connect(sock, path, timeout)
        uid = peer_uid(sock)
    except OSError as error:
        sock.close()
        raise PeerRefused(str(path), "unreachable", str(error), fix="Is that process alive?") from error
    if uid != os.geteuid():
        sock.close()
        raise PeerRefused(str(path), "uid", f"it runs as user {uid}, we are {os.geteuid()}")
    return sock


def _connect(sock: socket.socket, path: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            sock.connect(str(path))
        except BlockingIOError:  # its queue is full, and a socket with a timeout does not wait for that
            if time.monotonic() > deadline:
                raise
            time.sleep(1e-2)
        else:
            return


def _clear_the_way(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketPathError(str(path), "exists and is no socket", fix="Remove it, or use another name.")
    if found.st_uid != os.geteuid():
        raise SocketPathError(str(path), f"belongs to user {found.st_uid}, we are {os.geteuid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                os.unlink(path)  # its owner died without closing it
                return
            raise SocketPathError(str(path), f"exists, and cannot be probed ({error})") from error
    raise SocketPathError(str(path), "another engine listens there", fix="Give this engine another name.")


def _sweep(directory: Path) -> None:
    for path in directory.iterdir():
        named = _FRESH.fullmatch(path.name)
        if named is None or int(named[1]) == os.getpid():
            continue
        # The number says nothing: each container has a number 1. Whoever lives answers, and keeps its socket.
        with contextlib.suppress(KvArenaError, OSError):
            _clear_the_way(path)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two engines that start at once must not take one stale socket over twice."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
