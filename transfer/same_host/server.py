"""The receiving side: a listening socket, and the senders that are connected to it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from base64 import b64decode
from collections.abc import Callable
from typing import Any, final

from kvarena.transfer.errors import ManifestMismatch
from kvarena.transfer.same_host.channel import Channel, ChannelClosed, SocketLoop
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.incoming import IncomingTable, Source
from kvarena.transfer.same_host.profile import EngineProfile
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sent_leases import LeaseKey
from kvarena.transfer.same_host.sockets import Listener, is_name
from kvarena.transfer.same_host.subscribers import Subscriber, Subscribers
from kvarena.transfer.same_host.wire import VERSION, Packet, PacketKind, field, peer_uid

__all__ = ["Server"]

_log = logging.getLogger(__name__)

# Connections that may say nothing at one time: each holds a descriptor of ours.
_MAX_SILENT = 64
# Senders that may be attached: each holds a descriptor, a ring, and descriptors of our handles under way.
_MAX_ATTACHED = 256


@final
class Server:
    """Lets senders attach, and hears from them.

    Parameters
    ----------
    loop : SocketLoop
        Runs all of it but the public methods.
    listener : Listener
        Owned from now on.
    subscribers : Subscribers
        Who has our arena.
    incoming : IncomingTable
        Who waits for pages.
    profile : EngineProfile
        Who we are.
    welcome : callable
        What a sender is told when it attaches.
    """

    def __init__(
        self,
        loop: SocketLoop,
        listener: Listener,
        subscribers: Subscribers,
        incoming: IncomingTable,
        profile: EngineProfile,
        welcome: Callable[[], dict[str, Any]],
    ) -> None:
        self._loop = loop
        self._sock, self.path = listener
        self._inode = os.lstat(self.path).st_ino
        self._subscribers = subscribers
        self._incoming = incoming
        self._profile = profile
        self._welcome = welcome
        self._sessions: set[_Session] = set()
        self._silent: dict[_Session, None] = {}
        self._closed = False
        # Given up to take a connection off the queue, and drop it, when there is no other one left.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._sock.setblocking(False)
        loop.watch(self._sock, self._accept)

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
        packet.close_fds()  # a sender has no reason to pass any
        subscriber = session.subscriber
        if subscriber is None:
            if packet.kind is not PacketKind.HELLO:
                raise WireError(f"{packet.kind.name} before HELLO")
            self._hello(session, packet.body)
        elif packet.kind is PacketKind.MAPPED:
            self._subscribers.answered(subscriber, field(packet.body, "epoch", int))
        elif packet.kind is PacketKind.COLLECT:
            self._incoming.collect()
        elif packet.kind is PacketKind.ADMITTED:
            self._incoming.bound(session.name, _lease_key(packet))
        elif packet.kind is PacketKind.FAILED:
            self._incoming.failed(session.name, _lease_key(packet), field(packet.body, "why", str))
        elif packet.kind is PacketKind.REVOKED:
            self._subscribers.revoked(subscriber, _lease_key(packet))
        else:
            raise WireError(f"a sender sent {packet.kind.name}")

    def _hello(self, session: _Session, body: dict[str, Any]) -> None:
        if body["version"] != VERSION:
            self._refuse(session, "version", f"it speaks version {body['version']}, we speak {VERSION}")
            return
        name, identity = field(body, "name", str), field(body, "identity", str)
        manifest = body.get("manifest")
        if not is_name(name) or not identity:
            raise WireError(f"it is called {name!r}, and its identity is {identity!r}")
        try:
            self._profile.check_manifest(
                None if manifest is None else b64decode(field(body, "manifest", str))
            )
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
        elif sum(bool(other.name) for other in self._sessions) >= _MAX_ATTACHED:
            self._refuse(session, "full", f"{_MAX_ATTACHED} senders are attached, which is the most")
            return
        self._silent.pop(session, None)
        session.name, session.identity, channel = name, identity, session.channel
        ring, fd = Ring.make()
        # Not at once: whoever reads the ring holds what the end of the session waits for.
        session.source = Source(name, ring, lambda why: self._loop.later(lambda: channel.close(why)))
        session.subscriber = Subscriber(name, channel)
        self._incoming.listen(session.source)
        try:
            channel.send(PacketKind.WELCOME, self._welcome(), (fd,))
        except ChannelClosed:
            return
        finally:
            os.close(fd)
        self._subscribers.add(session.subscriber)
        if not channel.is_open:  # it went while it was being entered
            self._subscribers.remove(session.subscriber)

    def _refuse(self, session: _Session, code: str, why: str, **more: Any) -> None:
        _log.warning("same-host: a peer was refused (%s): %s", code, why)
        with contextlib.suppress(ChannelClosed):
            session.channel.send(PacketKind.REFUSE, {"code": code, "why": why, **more})
        session.channel.close(f"refused: {why}")

    def _ended(self, session: _Session, why: str) -> None:
        self._sessions.discard(session)
        self._silent.pop(session, None)
        if session.subscriber is not None:
            self._subscribers.remove(session.subscriber)
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
        self.subscriber: Subscriber | None = None
        self.source: Source | None = None
