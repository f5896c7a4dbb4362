"""The receiving side: a listening socket, and the peers that have this engine's arena mapped."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from kvarena.transfer._same_host_channel import Channel, ChannelClosed, SocketLoop
from kvarena.transfer._same_host_errors import WireError
from kvarena.transfer._same_host_export import Exports, Told
from kvarena.transfer._same_host_incoming import IncomingTable
from kvarena.transfer._same_host_leases import LeaseKey
from kvarena.transfer._same_host_wire import VERSION, Kind, Packet, field, peer_uid
from kvarena.transfer.errors import ManifestMismatch

__all__ = ["Server"]

_log = logging.getLogger(__name__)


@final
class Server:
    """Tells peers what they may map and write, and hears from them what they have written.

    Parameters
    ----------
    loop : SocketLoop
        Runs all of it but the public methods.
    sock, path : socket.socket, Path
        Listening; both are owned from now on.
    exports : Exports
        Guarded by `changed`'s lock.
    changed : threading.Condition
        Notified when a peer has answered or gone.
    incoming : IncomingTable
        Who waits for pages.
    welcome : callable
        What a peer is told about us now.
    check_manifest : callable
        Raises `ManifestMismatch` for a peer's encoded manifest (or None).
    """

    def __init__(
        self,
        loop: SocketLoop,
        sock: socket.socket,
        path: Path,
        exports: Exports,
        changed: threading.Condition,
        incoming: IncomingTable,
        welcome: Callable[[], dict[str, Any]],
        check_manifest: Callable[[bytes | None], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self.path = path
        self._inode = os.lstat(path).st_ino
        self._exports = exports
        self._changed = changed
        self._incoming = incoming
        self._welcome = welcome
        self._check_manifest = check_manifest
        self._sessions: set[_Session] = set()
        sock.setblocking(False)
        loop.watch(sock, self._accept)

    @property
    def peers(self) -> tuple[str, ...]:
        """Who has this arena mapped."""
        with self._changed:
            return tuple(session.name for session in self._sessions if session.name)

    def tell_all(self, *, fence: bool) -> None:
        """Send every peer what has changed; the caller holds the lock."""
        for session in list(self._sessions):
            if session.name:
                self._tell(session, fence=fence)

    def wait_until_let_go(self, epoch: int, timeout: float) -> None:
        """Wait until no peer maps or writes anything older; whoever does not answer is let go.

        Its memory is then its own copy of what was ours: a handle lives as long as anyone maps it.
        """
        self._wait(
            lambda session: session.mapped_epoch >= epoch,
            timeout,
            "did not let go of memory that is given back",
        )

    def revoke(self, key: LeaseKey, timeout: float) -> None:
        """Tell every peer that a lease has ended, and wait until nobody writes under it."""
        with self._changed:
            asked = [session for session in self._sessions if session.name]
            for session in asked:
                session.revoking.add(key)
                with contextlib.suppress(ChannelClosed):
                    session.channel.send(Kind.REVOKE, {"request": key[0], "serial": key[1]})
        self._wait(
            lambda session: key not in session.revoking, timeout, "did not answer that a lease was revoked"
        )

    def close(self) -> None:
        """Stop listening, and end every connection; the peers unmap what they have."""
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        self._loop.forget(self._sock)
        with self._changed:
            sessions = list(self._sessions)
        for session in sessions:
            session.channel.close("the engine was closed")

    def _wait(self, answered: Callable[[_Session], bool], timeout: float, otherwise: str) -> None:
        def silent() -> list[_Session]:
            return [session for session in self._sessions if session.name and not answered(session)]

        with self._changed:
            if self._changed.wait_for(lambda: not silent(), timeout):
                return
            late = silent()
        for session in late:
            _log.warning("same-host: %s %s within %g s: it is detached", session.name, otherwise, timeout)
            session.channel.close(f"it {otherwise}")

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
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
        with self._changed:
            self._sessions.add(session)
        session.channel.start()

    def _handle(self, session: _Session, packet: Packet) -> None:
        packet.close_fds()  # a sender has none to give
        body = packet.body
        if not session.name:
            if packet.kind is not Kind.HELLO:
                raise WireError(f"{packet.kind.name} before HELLO")
            self._hello(session, body)
            return
        if packet.kind is Kind.MAPPED:
            with self._changed:
                session.mapped_epoch = field(body, "epoch", int)
                self._changed.notify_all()
            return
        key = (field(body, "request", str), field(body, "serial", int))
        if packet.kind is Kind.DONE:
            pages, epoch = field(body, "pages", int), field(body, "epoch", int)
            self._incoming.written(session.name, key, field(body, "sub_pool", str), pages, epoch)
        elif packet.kind is Kind.FAILED:
            self._incoming.failed(session.name, key, field(body, "why", str))
        elif packet.kind is Kind.REVOKED:
            with self._changed:
                session.revoking.discard(key)
                self._changed.notify_all()
        else:
            raise WireError(f"a sender sent {packet.kind.name}")

    def _hello(self, session: _Session, body: dict[str, Any]) -> None:
        if body["version"] != VERSION:
            self._refuse(session, "version", f"it speaks version {body['version']}, we speak {VERSION}")
            return
        name, identity = field(body, "name", str), field(body, "identity", str)
        manifest = body.get("manifest")
        try:
            self._check_manifest(None if manifest is None else b64decode(field(body, "manifest", str)))
        except ManifestMismatch as error:
            differences = [[d.field, repr(d.ours), repr(d.theirs)] for d in error.differences]
            self._refuse(session, "manifest", str(error)[:2000], differences=differences[:16])
            return
        except ValueError as error:
            raise WireError(str(error)) from None
        with self._changed:
            before = next((other for other in self._sessions if other.name == name), None)
        if before is not None and before.identity != identity:
            self._refuse(session, "name", f"a live peer called {name!r} is attached already")
            return
        if before is not None:
            before.channel.close("it attached again")
        with self._changed:
            session.name, session.identity = name, identity
            try:
                session.channel.send(Kind.WELCOME, self._welcome())
            except ChannelClosed:
                return
            self._tell(session, fence=False)

    def _refuse(self, session: _Session, code: str, why: str, **more: Any) -> None:
        _log.warning("same-host: a peer was refused (%s): %s", code, why)
        with contextlib.suppress(ChannelClosed):
            session.channel.send(Kind.REFUSE, {"code": code, "why": why, **more})
        session.channel.close(f"refused: {why}")

    def _tell(self, session: _Session, *, fence: bool) -> None:
        try:
            for page in self._exports.update_for(session.told, fence=fence):
                session.channel.send(Kind.EXPORT, page.body, page.fds)
        except ChannelClosed:
            return  # its end is on its way
        self._exports.told_all(session.told)

    def _ended(self, session: _Session, why: str) -> None:
        with self._changed:
            self._sessions.discard(session)
            self._changed.notify_all()
        if session.name:
            self._incoming.lost(session.name, why)


class _Session:
    """One connected sender."""

    channel: Channel

    def __init__(self) -> None:
        self.name = ""
        self.identity = ""
        self.told = Told()
        self.mapped_epoch = -1
        self.revoking: set[LeaseKey] = set()
