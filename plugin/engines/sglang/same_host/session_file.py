"""How a sender finds the same-host engine behind a Mooncake session: a record in the owner-only directory.

SGLang's own messages carry a session (``host:port``) and addresses, and nothing of ours is added to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import os
import socket
import stat
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import msgspec
from kvarena.transfer import Region
from kvarena.transfer.owner_only import write_atomically

__all__ = ["FileVersion", "SessionRecord", "is_this_host", "name_of"]

logger = logging.getLogger("kvarena.sglang")

_FORMAT = "kvarena-sglang-session 1"
_MAX_BYTES = 1 << 20

FileVersion = tuple[int, int, int]
"""Inode, time and length of a record's file: another version is another record."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine behind a session says of itself; written anew whenever its registration moves."""

    session: str
    """Mooncake's, as SGLang's messages carry it."""
    identity: str
    """Of one life of the engine: a successor on the same port has another."""
    description: str
    """For `SameHostEngine.connect`, in base64."""
    regions: list[tuple[int, int]]
    """Registered (address, bytes), each address as the peer knows it."""
    format: str = _FORMAT

    @classmethod
    def of(
        cls, session: str, identity: str, description: bytes, regions: tuple[Region, ...]
    ) -> SessionRecord:
        """The record of an engine as it is now."""
        encoded = b64encode(description).decode()
        return cls(
            session=session,
            identity=identity,
            description=encoded,
            regions=[(r.address, r.nbytes) for r in regions],
        )

    def connection(self) -> bytes:
        """What `SameHostEngine.connect` wants. Raises `ValueError`."""
        return b64decode(self.description, validate=True)

    def write(self, directory: Path) -> None:
        """Put it where peers look, in one step. Raises `OSError`."""
        write_atomically(path_of(directory, self.session), msgspec.json.encode(self))

    def remove(self, directory: Path) -> None:
        """Take it away, unless a successor's lies there by now. Never raises."""
        with contextlib.suppress(OSError):
            found = read(directory, self.session)
            if found is not None and found.identity == self.identity:
                path_of(directory, self.session).unlink()


def name_of(session: str) -> str:
    """The socket's name for a session: its port, and a digest of the whole, whatever the host looks like."""
    port = session.rpartition(":")[2]
    digest = hashlib.sha256(session.encode()).hexdigest()[:12]
    return f"sglang-{port if port.isdigit() else 'x'}-{digest}"


def path_of(directory: Path, session: str) -> Path:
    """Where a session's record lies."""
    return directory / f"{name_of(session)}.session.json"


def version_of(directory: Path, session: str) -> FileVersion | None:
    """Whether there is a record, and which; one look at the file system."""
    try:
        found = os.lstat(path_of(directory, session))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read(directory: Path, session: str) -> SessionRecord | None:
    """The record of a session; None: there is none, or none of ours that makes sense."""
    path = path_of(directory, session)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                logger.warning("kvarena: %s is no file of user %d; it is not used.", path, os.geteuid())
                return None
            record = msgspec.json.decode(file.read(_MAX_BYTES), type=SessionRecord)
    except OSError:
        return None
    except msgspec.MsgspecError as error:
        logger.warning("kvarena: %s is not used: %s.", path, error)
        return None
    if record.format != _FORMAT or record.session != session:
        logger.warning(
            "kvarena: %s is not used: it is a %r of session %s.", path, record.format, record.session
        )
        return None
    return record


def is_this_host(session: str) -> bool:
    """Whether the session's host is an address of this machine: only then can one bind to it."""
    host = session.rpartition(":")[0].strip("[]")
    try:
        found: list[Any] = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError, ValueError), socket.socket(family, kind) as probe:
            if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
                continue
            probe.bind(address)
            return True
    return False
