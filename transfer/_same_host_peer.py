"""A peer that this engine writes to: its mapped arena, its leases, and what is under way to it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, final

from kvarena.transfer._copy import Copier, Int64, Ticket
from kvarena.transfer._same_host_channel import Channel, ChannelClosed, SocketLoop
from kvarena.transfer._same_host_errors import WireError
from kvarena.transfer._same_host_import import MappedArena
from kvarena.transfer._same_host_leases import LeasedPart, PageLease, SentLeases
from kvarena.transfer._same_host_pending import Flights, SameHostPending
from kvarena.transfer._same_host_wire import Kind, Packet, field
from kvarena.transfer.errors import LeaseError, TransferFailed

__all__ = ["Peer"]

_log = logging.getLogger(__name__)


@final
class Peer:
    """One attached receiver.

    Parameters
    ----------
    name, identity : str
        The engine's name, and which life of it this is.
    arena : MappedArena
        Owned from now on.
    copier : Copier
        Shared by all peers.
    loop : SocketLoop
        Reads the connection, once `listen` was called.
    sock : socket.socket
        Connected to it; owned from now on.
    on_gone : callable
        Called once, after the connection has ended and the peer's memory was unmapped.
    drain_timeout : float
        Seconds that copies under way may take; after that the memory beneath them stays mapped.
    """

    def __init__(
        self,
        name: str,
        identity: str,
        arena: MappedArena,
        copier: Copier,
        loop: SocketLoop,
        sock: socket.socket,
        on_gone: Callable[[Peer], None],
        drain_timeout: float,
    ) -> None:
        self.name = name
        self.identity = identity
        self._arena = arena
        self._copier = copier
        self._drain_timeout = drain_timeout
        # Held while a copy is checked and started, so that no region goes and no lease ends in between.
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._flights = Flights()
        self._leases = SentLeases()
        self._on_gone = on_gone
        self._gone: str | None = None
        self._channel = Channel(loop, sock, self.handle, self._end)

    @property
    def epoch(self) -> int:
        """Of the peer's registration, as it is mapped here."""
        return self._arena.epoch

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the peer's memory that are mapped here."""
        return self._arena.mapped_bytes

    @property
    def in_flight(self) -> int:
        """Transfers under way."""
        return len(self._flights)

    @property
    def arena_base(self) -> int:
        """The peer's own address of its arena."""
        return self._arena.peer_base

    @property
    def gone(self) -> str | None:
        """Why it cannot be written to any more."""
        return self._gone

    def listen(self) -> None:
        """Follow what the peer says from now on."""
        self._channel.start()

    def wait_for_epoch(self, epoch: int, timeout: float) -> bool:
        """Whether the peer's registration of that epoch is mapped here within `timeout` seconds."""
        with self._moved:
            return self._moved.wait_for(
                lambda: self._arena.epoch >= epoch or self._gone is not None, timeout
            ) and (self._gone is None)

    def spans(self, src: Int64, dst: Int64, lengths: Int64, after: int | None) -> SameHostPending:
        """Start to write ranges; raises `TransferFailed`."""
        with self._lock:
            self._require(dst.size)
            outside = self._arena.intervals.first_outside(dst, lengths)
            if outside is not None:
                raise self._unregistered(int(dst[outside]), int(lengths[outside]), dst.size)
            pending = SameHostPending(self._flights, self.name, dst.size)
            return self._start(
                pending,
                lambda: self._copier.copy_spans(src, dst + self._arena.shift, lengths, pending.ended, after),
            )

    def pages(
        self,
        src_base: int,
        src_pages: Int64,
        dst_base: int | None,
        dst_pages: Int64,
        page_bytes: int,
        lease: PageLease,
        sub_pool: str,
        after: int | None,
    ) -> SameHostPending:
        """Start to write leased pages; raises `TransferFailed` or `LeaseError`, and tells the receiver."""
        count = dst_pages.size
        with self._lock:
            try:
                self._require(count)
                base = self._arena.peer_base if dst_base is None else dst_base
                part = self._leases.take(lease, sub_pool, dst_pages)
                intervals = self._arena.intervals
                # All pages of a lease are nearly always in one interval; then these are, too.
                if not intervals.covers(base, base + (part.high + 1) * page_bytes) and not (
                    count == 0 or intervals.covers_pages(base, dst_pages, page_bytes)
                ):
                    raise self._unregistered(base, page_bytes, count)
                pending = SameHostPending(
                    self._flights,
                    self.name,
                    count,
                    (lease.request, lease.serial),
                    lambda error: self._report(lease, part, count, error),
                )
                return self._start(
                    pending,
                    lambda: self._copier.copy_pages(
                        src_base,
                        base + self._arena.shift,
                        src_pages,
                        dst_pages,
                        page_bytes,
                        pending.ended,
                        after,
                    ),
                )
            except LeaseError:
                raise  # a wrong page or an old lease is no reason to end the lease that it names
            except TransferFailed as error:
                self.give_up(lease, error.why)
                raise error.of(lease.request) from error

    def admit(self, lease: PageLease) -> None:
        """Get to know a lease before its first page is written."""
        self._leases.admit(lease)

    def give_up(self, lease: PageLease, why: str) -> None:
        """Tell the receiver at once that these pages will not come."""
        self._leases.end((lease.request, lease.serial), f"was given up: {why}")
        self._send(Kind.FAILED, {"request": lease.request, "serial": lease.serial, "why": why[:1000]})

    def close(self, why: str) -> None:
        """Detach: wait for what is under way, unmap, and end the connection. Never raises."""
        with self._lock:
            self._gone = self._gone or why
            self._drain()
        self._channel.close(why)

    def handle(self, packet: Packet) -> None:
        """Follow one packet of the peer; after an error (`WireError`, `HandleImportError`) close it."""
        if packet.kind is Kind.EXPORT:
            self._export(packet)
            return
        packet.close_fds()
        if packet.kind is not Kind.REVOKE:
            raise WireError(f"a receiver sent {packet.kind.name}")
        self._revoke(packet)

    def drain(self, timeout: float) -> bool:
        """Wait for what is under way now; whether it has ended."""
        with self._lock:
            return self._flights.drain(timeout)

    def _export(self, packet: Packet) -> None:
        with self._moved:
            try:
                more = self._arena.stage(packet)
            except WireError:
                packet.close_fds()
                raise
            if more:
                return
            try:
                self._arena.commit(self._drained)
            except TransferFailed as error:
                self._gone = str(error)
                raise
            self._moved.notify_all()
        self._send(Kind.MAPPED, {"epoch": self._arena.epoch})

    def _revoke(self, packet: Packet) -> None:
        key = (field(packet.body, "request", str), field(packet.body, "serial", int))
        with self._lock:
            self._leases.end(key, "was revoked")
            self._drained(key)
        self._send(Kind.REVOKED, {"request": key[0], "serial": key[1]})

    def _start(self, pending: SameHostPending, copy: Callable[[], Ticket]) -> SameHostPending:
        try:
            pending.started(copy())
        except Exception as error:
            pending.abandon()
            raise TransferFailed("same-host", self.name, "copy", str(error)) from error
        return pending

    def _report(self, lease: PageLease, part: LeasedPart, pages: int, error: TransferFailed | None) -> None:
        if error is not None:
            self.give_up(lease, error.why)
        elif pages:
            try:
                self._channel.send_encoded(
                    part.report + b'"pages":%d,"epoch":%d}' % (pages, self._arena.epoch)
                )
            except ChannelClosed:
                _log.debug("%s is gone before it was told that its pages are written", self.name)

    def _send(self, kind: Kind, body: dict[str, Any]) -> None:
        try:
            self._channel.send(kind, body)
        except ChannelClosed:
            _log.debug("%s was not told %s: it is gone", self.name, kind.name)

    def _end(self, reason: str) -> None:
        with self._moved:
            self._gone = self._gone or reason
            self._flights.doom(self._gone)
            if self._drain():
                self._arena.close()
            self._moved.notify_all()
        self._on_gone(self)

    def _drained(self, key: object = None) -> None:
        if not self._flights.drain(self._drain_timeout, key):
            raise TransferFailed("same-host", self.name, "copy", f"not done within {self._drain_timeout:g} s")

    def _drain(self) -> bool:
        drained = self._flights.drain(self._drain_timeout)
        if not drained:
            _log.error(
                "%d copies to %s did not end within %g s: its memory stays mapped",
                len(self._flights),
                self.name,
                self._drain_timeout,
            )
        return drained

    def _require(self, operations: int) -> None:
        if self._gone is not None:
            raise TransferFailed("same-host", self.name, "peer", self._gone, operations=operations)

    def _unregistered(self, address: int, nbytes: int, operations: int) -> TransferFailed:
        return TransferFailed(
            "same-host",
            self.name,
            "EFAULT",
            f"{nbytes} bytes at {address:#x} are not all registered there (epoch {self.epoch})",
            operations=operations,
            fix="Connect to its new description if it has grown.",
        )
