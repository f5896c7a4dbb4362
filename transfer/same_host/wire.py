"""Packets between two engines of one host: a short header, a JSON body, and file descriptors.

The socket keeps packet borders (``SOCK_SEQPACKET``), so nothing has to be reassembled and garbage cannot
put the two sides out of step.
"""

from __future__ import annotations

import array
import contextlib
import enum
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from kvarena.transfer.same_host.errors import WireError

__all__ = [
    "FDS_PER_PACKET",
    "VERSION",
    "Packet",
    "PacketKind",
    "encode",
    "field",
    "peer_uid",
    "receive",
    "rows",
    "transmit",
]

VERSION = 3
"""Of the protocol; two engines must agree on it."""

FDS_PER_PACKET = 64
"""The kernel takes 253 at most (SCM_MAX_FD)."""

_HEADER = struct.Struct("!4sHH")
_MAGIC = b"kvar"
# The default socket buffer is 208 KiB and holds a whole packet with its overhead.
_PACKET_BYTES = 64 * 1024

_T = TypeVar("_T")


class PacketKind(enum.IntEnum):
    """What a packet says. A client connects, and sends pages; a server receives them."""

    HELLO = 1
    """Client: who I am, and what my pages look like."""
    WELCOME = 2
    """Server: who I am, with the memory in which finished copies are counted; exports follow."""
    REFUSE = 3
    """Server: which check failed, and why. The connection ends."""
    EXPORT = 4
    """Either: memory to map and to unmap, and the regions that may be used."""
    MAPPED = 5
    """Either: I am at this epoch, and nothing older is mapped or being copied."""
    ADMITTED = 6
    """Client: I am the one that will write this lease."""
    FAILED = 7
    """Client: a leased request will not be completed."""
    REVOKE = 8
    """Server: this lease no longer holds."""
    REVOKED = 9
    """Client: nothing is, or will be, written under it."""
    COLLECT = 10
    """Client: read what has ended, so that there is room for more."""


class Packet(NamedTuple):
    """One message between two engines, with the descriptors that came along."""

    kind: PacketKind
    body: dict[str, Any]
    fds: tuple[int, ...] = ()

    def close_fds(self) -> None:
        """Close every descriptor that came with it."""
        for fd in self.fds:
            os.close(fd)


def encode(kind: int, body: dict[str, Any], *, version: int = VERSION) -> bytes:
    """A packet's bytes; raises `WireError` if they are too many."""
    data = _HEADER.pack(_MAGIC, version, kind) + json.dumps(body, separators=(",", ":")).encode()
    if len(data) > _PACKET_BYTES:
        raise WireError(f"{len(data)} bytes to send, {_PACKET_BYTES} fit")
    return data


def decode(data: bytes, fds: tuple[int, ...] = ()) -> Packet:
    """The packet in these bytes; raises `WireError` for anything else."""
    if len(data) < _HEADER.size:
        raise WireError(f"{len(data)} bytes")
    magic, version, kind = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise WireError(f"it starts with {magic!r}")
    if version != VERSION and kind not in (PacketKind.HELLO, PacketKind.REFUSE):
        raise WireError(f"protocol version {version}, ours is {VERSION}")
    try:
        named = PacketKind(kind)
        # Strictly UTF-8: left to itself, `json` takes other encodings, and halves of pairs as they are.
        body = json.loads(data[_HEADER.size :].decode())
        if b"\\u" in data:
            json.dumps(body, ensure_ascii=False).encode()  # half of a pair is no text for anyone further on
    except (ValueError, RecursionError) as error:
        raise WireError(str(error)) from None
    if not isinstance(body, dict):
        raise WireError(f"the body is a {type(body).__name__}")
    if named in (PacketKind.HELLO, PacketKind.REFUSE):
        body["version"] = version
    return Packet(named, body, fds)


def transmit(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet; descriptors stay the caller's. Raises `OSError` (`BlockingIOError`: later)."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> Packet | None:
    """The next packet, or None at the end of the connection.

    Raises
    ------
    WireError
        It is malformed; descriptors that came with it are closed.
    OSError
        The socket failed, or (`BlockingIOError`) has nothing yet.
    """
    space = socket.CMSG_SPACE(FDS_PER_PACKET * 4)
    data, ancillary, flags, _ = sock.recvmsg(_PACKET_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise WireError("more bytes or descriptors than a packet may have")
        if not data and not fds:
            return None
        return decode(data, tuple(fds))
    except WireError:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise


def peer_uid(sock: socket.socket) -> int:
    """The user that the other end runs as, by the kernel's word (SO_PEERCRED)."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)


def field(body: dict[str, Any], name: str, kind: type[_T]) -> _T:
    """A field of a body; raises `WireError` if it is missing, of another type, negative or past 2**63."""
    value = body.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise WireError(f"{name} is {value!r}")
    if isinstance(value, int) and not 0 <= value < 1 << 63:
        raise WireError(f"{name} is {value}")
    return value


def rows(body: dict[str, Any], name: str, width: int) -> list[tuple[int, ...]]:
    """A field that is a table of non-negative integers, `width` in a row."""
    table = field(body, name, list)
    for row in table:
        if not isinstance(row, list) or len(row) != width:
            raise WireError(f"{name} has the row {row!r}")
        if any(
            not isinstance(cell, int) or isinstance(cell, bool) or not 0 <= cell < 1 << 63 for cell in row
        ):
            raise WireError(f"{name} has the row {row!r}")
    return [tuple(row) for row in table]
