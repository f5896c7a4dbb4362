"""The receiving side: a listening socket, and the senders that are connected to it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from base64 import b64decode
from pathlib import Path
from typing import Any, Protocol, final

from kvarena.errors import KvArenaError
from kvarena.transfer.errors import ManifestMismatch, QuiesceTimeout
from kvarena.transfer.same_host.channel import Channel, ChannelClosed, SocketLoop
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.incoming import IncomingTable, Source
from kvarena.transfer.same_host.pull import Puller
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sent_leases import LeaseKey
from kvarena.transfer.same_host.socket_path import is_name
from kvarena.transfer.same_host.subscribers import Follower, Followers
from kvarena.transfer.same_host.wire import VERSION, Kind, Packet, field, peer_uid

__all__ = ["Host", "Server"]

_log = logging.getLogger(__name__)

# Connections that may say nothing at one time: each holds a descriptor of ours.
_MAX_SILENT = 64


class Host(Protocol):
    """What the server asks of its engine."""

    def welcome(self, device: str) -> dict[str, Any]:
        """What a peer on that device is told about us now."""
        ...

    def check_manifest(self, encoded: bytes | None) -> None:
        """Raise `ManifestMismatch` for a peer's encoded manifest (or None)."""
        ...

    def make_puller(self, name: str, base: int, reserved_bytes: int, memory: str, ring: Ring) -> Puller:
        """For a peer that wants us to make the copies; raises `KvArenaError` or `RuntimeError`."""
        ...


@final
class Server:
    """Lets senders attach, and hears from them.

    Parameters
    ----------
    loop : SocketLoop
        Runs all of it but the public methods.
    sock, path : socket.socket, Path
        Listening; both are owned from now on.
    followers : Followers
        Who has our arena.
    incoming : IncomingTable
        Who waits for pages.
    host : Host
        The engine.
    """

    def __init__(
        self,
        loop: SocketLoop,
        sock: socket.socket,
        path: Path,
        followers: Followers,
        incoming: IncomingTable,
        host: Host,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self.path = path
        self._inode = os.lstat(path).st_ino
        self._followers = followers
        self._incoming = incoming
        self._host = host
        self._sessions: set[_Session] = set()
        self._silent: dict[_Session, None] = {}
        self._closed = False
        # Given up to take a connection off the queue, and drop it, when there is no other one left.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        sock.setblocking(False)
        loop.watch(sock, self._accept)

    def drain(self, timeout: float) -> None:
        """Wait for the copies that we make for senders. Raises `QuiesceTimeout`."""
        for session in tuple(self._sessions):
            if session.puller is not None and not session.puller.remote.drain(timeout):
                raise QuiesceTimeout(
                    f"Transfers that {session.name} asked for did not end",
                    in_flight=session.puller.remote.in_flight,
                    seconds=timeout,
                )

    def close(self) -> None:
        """Stop listening, and end every connection; the peers unmap what they have."""
        self._closed = True
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        self._loop.forget(self._sock)
        self._loop.call(self._close_spare)
        for session in tuple(self._sessions):
            session.channel.close("the engine was closed")

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return
        try:
            uid = peer_uid(sock)
        except OSError:
            sock.close()
            return
        if uid != os.geteuid():
            _log.warning("same-host: a process of user %d was turned away from %s", uid, self.path)
            sock.close()
            return
        session = _Session()
        session.channel = Channel(
            self._loop,
            sock,
            lambda packet: self._handle(session, packet),
            lambda why: self._ended(session, why),
        )
        self._sessions.add(session)
        self._silent[session] = None
        session.channel.start()
        if self._closed:  # meanwhile, and who closes may not have seen this one
            session.channel.close("the engine was closed")
        if len(self._silent) > _MAX_SILENT:
            self._drop_silent()

    def _make_room(self) -> None:
        """No descriptor is left for whoever waits, and would be reported as waiting for ever."""
        _log.warning("same-host: no descriptor is left for a connection to %s", self.path)
        if self._silent:
            self._drop_silent()
            return
        self._close_spare()
        with contextlib.suppress(OSError):
            self._sock.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
        self._spare = -1

    def _drop_silent(self) -> None:
        next(iter(self._silent)).channel.close("it said nothing, and others wait")

    def _handle(self, session: _Session, packet: Packet) -> None:
        if packet.kind is Kind.EXPORT and session.puller is not None:
            epoch = session.puller.remote.follow(packet)
            if epoch is not None:
                with contextlib.suppress(ChannelClosed):
                    session.channel.send(Kind.MAPPED, {"epoch": epoch})
            return
        packet.close_fds()  # nothing else comes with any
        follower = session.follower
        if follower is None or session.ring is None:
            if packet.kind is not Kind.HELLO:
                raise WireError(f"{packet.kind.name} before HELLO")
            self._hello(session, packet.body)
        elif packet.kind is Kind.MAPPED:
            self._followers.answered(follower, field(packet.body, "epoch", int))
        elif packet.kind is Kind.COLLECT:
            self._incoming.collect()
        elif packet.kind is Kind.ADMITTED:
            self._incoming.bound(session.name, _lease_key(packet))
        elif packet.kind is Kind.FAILED:
            self._incoming.failed(session.name, _lease_key(packet), field(packet.body, "why", str))
        elif packet.kind is Kind.REVOKED:
            self._followers.revoked(follower, _lease_key(packet))
        elif packet.kind is Kind.OFFER and session.puller is None:
            self._offered(session, session.ring, packet.body)
        elif packet.kind is Kind.PULL and session.puller is not None:
            session.puller.pull(packet)
        else:
            raise WireError(f"a sender sent {packet.kind.name}")

    def _hello(self, session: _Session, body: dict[str, Any]) -> None:
        if body["version"] != VERSION:
            self._refuse(session, "version", f"it speaks version {body['version']}, we speak {VERSION}")
            return
        name, identity = field(body, "name", str), field(body, "identity", str)
        manifest, device = body.get("manifest"), field(body, "device", str)
        if not is_name(name) or not identity:
            raise WireError(f"it is called {name!r}, and its identity is {identity!r}")
        try:
            self._host.check_manifest(None if manifest is None else b64decode(field(body, "manifest", str)))
        except ManifestMismatch as error:
            differences = [[d.field, repr(d.ours), repr(d.theirs)] for d in error.differences]
            self._refuse(session, "manifest", str(error)[:2000], differences=differences[:16])
            return
        except ValueError as error:
            raise WireError(str(error)) from None
        before = next((other for other in self._sessions if other.name == name), None)
        if before is not None and before.identity != identity:
            self._refuse(session, "name", f"a live peer called {name!r} is attached already")
            return
        if before is not None:
            before.channel.close("it attached again")
        self._silent.pop(session, None)
        session.name, session.identity, channel = name, identity, session.channel
        ring, fd = Ring.make()
        session.ring = ring
        # Not at once: whoever reads the ring holds what the end of the session waits for.
        session.source = Source(name, ring, lambda why: self._loop.later(lambda: channel.close(why)))
        session.follower = Follower(name, channel, sends=True)
        self._incoming.listen(session.source)
        try:
            channel.send(Kind.WELCOME, self._host.welcome(device), (fd,))
        except ChannelClosed:
            return
        finally:
            os.close(fd)
        self._followers.add(session.follower)
        if not channel.is_open:  # it went while it was being entered
            self._followers.remove(session.follower)

    def _offered(self, session: _Session, ring: Ring, body: dict[str, Any]) -> None:
        base, reserved = field(body, "base", int), field(body, "reserved_bytes", int)
        try:
            session.puller = self._host.make_puller(
                session.name, base, reserved, field(body, "memory", str), ring
            )
            self._incoming.pulls = True
        except (KvArenaError, RuntimeError) as error:
            self._refuse(session, "import", str(error)[:2000])

    def _refuse(self, session: _Session, code: str, why: str, **more: Any) -> None:
        _log.warning("same-host: a peer was refused (%s): %s", code, why)
        with contextlib.suppress(ChannelClosed):
            session.channel.send(Kind.REFUSE, {"code": code, "why": why, **more})
        session.channel.close(f"refused: {why}")

    def _ended(self, session: _Session, why: str) -> None:
        self._sessions.discard(session)
        self._silent.pop(session, None)
        if session.follower is not None:
            self._followers.remove(session.follower)
        if session.puller is not None:
            session.puller.end(why)
        if session.source is not None:
            self._incoming.lost(session.source, why)


def _lease_key(packet: Packet) -> LeaseKey:
    return field(packet.body, "request", str), field(packet.body, "serial", int)


class _Session:
    """One connected sender."""

    channel: Channel

    def __init__(self) -> None:
        self.name = ""
        self.identity = ""
        self.follower: Follower | None = None
        self.ring: Ring | None = None
        self.source: Source | None = None
        self.puller: Puller | None = None
