"""A peer that this engine sends to: its arena, its leases, and what is under way to it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

from kvarena.transfer._batch import PageBatch, PageLease
from kvarena.transfer.errors import LeaseError, TransferFailed
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.channel import Channel, ChannelClosed, SocketLoop
from kvarena.transfer.same_host.copy.clock import Copier
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.exports import Exports
from kvarena.transfer.same_host.intervals import Intervals, PageBounds, highest
from kvarena.transfer.same_host.mapped_arena import MappedArena
from kvarena.transfer.same_host.pending import SameHostPending
from kvarena.transfer.same_host.push import Push
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sent_leases import SentLeases
from kvarena.transfer.same_host.tickets import Tickets
from kvarena.transfer.same_host.wire import Packet, PacketKind, field

__all__ = ["Attached", "Peer", "SendingSide"]

_log = logging.getLogger(__name__)


class Attached(NamedTuple):
    """What shaking hands with a receiver gave; owned by the peer that is made of it."""

    name: str
    identity: str
    """Which life of the receiver this is."""
    arena: MappedArena
    ring: Ring
    """The receiver's, in which finished copies are counted."""
    sock: socket.socket
    """Connected to it."""


@dataclass(frozen=True)
class SendingSide:
    """What all peers of one engine share."""

    copier: Copier
    exports: Exports
    """What may be sent."""
    loop: SocketLoop
    """Reads the connections."""
    drain_timeout: float
    """As for `Push`."""
    on_gone: Callable[[Peer], None]
    """Called once for a peer, after its connection has ended and its memory was let go."""


@final
class Peer:
    """One attached receiver.

    Parameters
    ----------
    attached : Attached
    ours : SendingSide

    Raises
    ------
    RuntimeError
        Our device cannot write to the memory of the ring, which is closed then, like the arena.
    """

    def __init__(self, attached: Attached, ours: SendingSide) -> None:
        self.name = attached.name
        self.identity = attached.identity
        self._exports = ours.exports
        self._on_gone = ours.on_gone
        self._drain_timeout = ours.drain_timeout
        self._leases = SentLeases()
        self._own_bounds, self._bounds = PageBounds(), PageBounds()
        self._channel = Channel(ours.loop, attached.sock, self.handle, self._end)
        self._tickets = Tickets(self.name, attached.ring, self._channel, ours.drain_timeout)
        self._push = Push(
            self.name, attached.arena, self._tickets, ours.copier, self._channel, ours.drain_timeout
        )
        self._lock = self._push.lock

    @property
    def epoch(self) -> int:
        """Of the peer's registration, as it is known here."""
        return self._push.arena.epoch

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the peer's memory that are mapped here."""
        return self._push.arena.mapped_bytes

    @property
    def in_flight(self) -> int:
        """Transfers under way."""
        return self._push.in_flight

    @property
    def arena_base(self) -> int:
        """The peer's own address of its arena."""
        return self._push.arena.peer_base

    @property
    def gone(self) -> str | None:
        """Why it cannot be written to any more."""
        return self._push.gone

    @property
    def is_live(self) -> bool:
        """Whether it can be written to, as far as its end of the connection tells."""
        return self.gone is None and not self._channel.is_hung_up

    def listen(self) -> None:
        """Follow what the peer says from now on."""
        self._channel.start()

    def wait_for_epoch(self, epoch: int, timeout: float) -> bool:
        """See `Push.wait_for_epoch`."""
        return self._push.wait_for_epoch(epoch, timeout)

    def spans(self, src: Int64, dst: Int64, lengths: Int64, after: int | None) -> SameHostPending:
        """Start to write ranges; raises `TransferFailed`."""
        push, count = self._push, dst.size
        with self._lock:
            push.require(count)
            self._require_here(src, lengths)
            self._require_there(dst, lengths)
            try:
                number = push.spans(src, dst, lengths, after)
            except RuntimeError as error:
                raise self._failure("copy", str(error), count) from error
        return push.pending(number, count)

    def pages(self, batch: PageBatch, src: Int64, dst: Int64, src_base: int) -> SameHostPending:
        """Start to write leased pages; raises `TransferFailed` or `LeaseError`, and tells the receiver.

        Parameters
        ----------
        src, dst : Int64
            Page ids of `batch`, checked.
        src_base : int
            Address of page 0 here.
        """
        push, count, lease, page_bytes = self._push, dst.size, batch.lease, batch.page_bytes
        with self._lock:
            try:
                if push.gone is not None:
                    push.require(count)
                ours, arena = self._exports.intervals, push.arena
                # One bound, cached, answers for nearly every pool: all from page 0 on is registered.
                if highest(src) >= self._own_bounds.pages(
                    ours, src_base, page_bytes
                ) and not ours.covers_pages(src_base, src, page_bytes):
                    raise self._failure("EINVAL", "source pages are not registered here", count)
                base = arena.peer_base if batch.dst_base is None else batch.dst_base
                part = self._leases.take(lease, batch.sub_pool, dst)
                intervals = arena.intervals
                # If all pages of the lease are in bounds, these are, too.
                if count and (
                    part.high >= self._bounds.pages(intervals, base, page_bytes)
                    and not intervals.covers_pages(base, dst, page_bytes)
                ):
                    raise self._unregistered(base, page_bytes, count)
                number = push.pages(batch, src, dst, (src_base, base), part)
            except LeaseError:
                raise  # a wrong page or an old lease is no reason to end the lease that it names
            except TransferFailed as error:
                self.give_up(lease, error.why)
                raise error.of(lease.request) from error
            except RuntimeError as error:
                self.give_up(lease, str(error))
                raise self._failure("copy", str(error), count).of(lease.request) from error
            # From here on it runs: what follows costs no time.
            self._leases.taken(lease)
            self._tickets.remind()
        return push.pending(number, count, lease.request)

    def admit(self, lease: PageLease) -> None:
        """Get to know a lease before its first page is written, and tell the receiver who will write it."""
        # First, as whoever writes under an admitted lease need not say so any more.
        self._send(PacketKind.ADMITTED, {"request": lease.request, "serial": lease.serial})
        with self._lock:
            self._leases.admit(lease)

    def give_up(self, lease: PageLease, why: str) -> None:
        """Tell the receiver at once that these pages will not come."""
        with self._lock:
            self._leases.end((lease.request, lease.serial), f"was given up: {why}")
        self._send(PacketKind.FAILED, {"request": lease.request, "serial": lease.serial, "why": why[:1000]})

    def close(self, why: str) -> None:
        """Detach: wait for what is under way, unmap, and end the connection. Never raises."""
        with self._lock:
            self._push.gone = self._push.gone or why
            self._push.drain(self._drain_timeout)
        self._channel.close(why)

    def handle(self, packet: Packet) -> None:
        """Follow one packet of the peer; after an error (`WireError`, `HandleImportError`) close it."""
        if packet.kind is PacketKind.EXPORT:
            epoch = self._push.follow(packet)
            if epoch is not None:
                self._send(PacketKind.MAPPED, {"epoch": epoch})
            return
        packet.close_fds()
        if packet.kind is PacketKind.REVOKE:
            self._revoke(packet)
        elif packet.kind is PacketKind.REFUSE:
            self._channel.close(f"it refused ({packet.body.get('code')}): {packet.body.get('why')}")
        else:
            raise WireError(f"a receiver sent {packet.kind.name}")

    def let_go(self) -> bool:
        """See `Push.let_go`."""
        return self._push.let_go()

    def drain(self, timeout: float) -> bool:
        """Wait for what is under way now; whether it has ended."""
        return self._push.drain(timeout)

    def _revoke(self, packet: Packet) -> None:
        key = (field(packet.body, "request", str), field(packet.body, "serial", int))
        with self._lock:
            self._leases.end(key, "was revoked")
            self._push.drained()
        self._send(PacketKind.REVOKED, {"request": key[0], "serial": key[1]})

    def _send(self, kind: PacketKind, body: dict[str, object]) -> None:
        try:
            self._channel.send(kind, body)
        except ChannelClosed:
            _log.debug("%s was not told %s: it is gone", self.name, kind.name)

    def _end(self, reason: str) -> None:
        self._push.end(reason)
        self._on_gone(self)

    def _require_here(self, starts: Int64, lengths: Int64) -> None:
        outside = _outside(self._exports.intervals, starts, lengths)
        if outside is not None:
            where = f"{int(lengths[outside])} bytes at {int(starts[outside]):#x} here"
            raise self._failure("EINVAL", f"{where} are not registered", starts.size)

    def _require_there(self, starts: Int64, lengths: Int64) -> None:
        outside = _outside(self._push.arena.intervals, starts, lengths)
        if outside is not None:
            raise self._unregistered(int(starts[outside]), int(lengths[outside]), starts.size)

    def _failure(self, code: str, why: str, operations: int) -> TransferFailed:
        return TransferFailed("same-host", self.name, code, why, operations=operations)

    def _unregistered(self, address: int, nbytes: int, operations: int) -> TransferFailed:
        return TransferFailed(
            "same-host",
            self.name,
            "EFAULT",
            f"{nbytes} bytes at {address:#x} are not all registered there (epoch {self.epoch})",
            operations=operations,
            fix="Connect to its new description if it has grown.",
        )


def _outside(intervals: Intervals, starts: Int64, lengths: Int64) -> int | None:
    """`Intervals.first_outside`, sooner for the usual case of one run."""
    if starts.size == 1:
        start = int(starts[0])
        if intervals.covers(start, start + int(lengths[0])):
            return None
    return intervals.first_outside(starts, lengths)
