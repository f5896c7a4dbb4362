"""A peer that this engine sends to: its arena, its leases, and what is under way to it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, Literal, final

from kvarena.transfer.errors import LeaseError, TransferFailed
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.channel import Channel, ChannelClosed, SocketLoop
from kvarena.transfer.same_host.copy.clock import Copier
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.exports import Exports
from kvarena.transfer.same_host.intervals import Intervals, PageBounds, highest
from kvarena.transfer.same_host.mapped_arena import MappedArena
from kvarena.transfer.same_host.pending import SameHostPending
from kvarena.transfer.same_host.pull import Pull
from kvarena.transfer.same_host.push import Push, Tickets
from kvarena.transfer.same_host.remote import Remote
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sent_leases import PageLease, SentLeases
from kvarena.transfer.same_host.subscribers import Follower, Followers
from kvarena.transfer.same_host.wire import Kind, Packet, field

__all__ = ["Peer"]

_log = logging.getLogger(__name__)


@final
class Peer:
    """One attached receiver.

    Parameters
    ----------
    name, identity : str
        The engine's name, and which life of it this is.
    direction : {"push", "pull"}
        Which side makes the copies.
    arena : MappedArena
        Owned from now on, as are `ring` and `sock`.
    ring : Ring
        The receiver's, in which finished copies are counted.
    copier : Copier
        Ours, shared by all peers.
    ours : Exports
        What may be sent.
    followers : Followers
        Of our arena: a peer that pulls becomes one.
    loop : SocketLoop
        Reads the connection, once `listen` was called.
    sock : socket.socket
        Connected to it.
    on_gone : callable
        Called once, after the connection has ended and the peer's memory was unmapped.
    drain_timeout : float
        As for `Remote`.

    Raises
    ------
    RuntimeError
        Our device cannot write to the memory of `ring`, which is closed then, like `arena`.
    """

    def __init__(
        self,
        name: str,
        identity: str,
        direction: Literal["push", "pull"],
        arena: MappedArena,
        ring: Ring,
        copier: Copier,
        ours: Exports,
        followers: Followers,
        loop: SocketLoop,
        sock: socket.socket,
        on_gone: Callable[[Peer], None],
        drain_timeout: float,
    ) -> None:
        self.name = name
        self.identity = identity
        self.direction: Literal["push", "pull"] = direction
        self._ring = ring
        self._ours = ours
        self._followers = followers
        self._on_gone = on_gone
        self._drain_timeout = drain_timeout
        self._leases = SentLeases()
        self._own_bounds, self._bounds = PageBounds(), PageBounds()
        self._follower: Follower | None = None
        self._channel = Channel(loop, sock, self.handle, self._end)
        self._tickets = Tickets(name, ring, self._channel, drain_timeout)
        try:
            self._way = (
                Push(self._tickets, copier)
                if direction == "push"
                else Pull(self._tickets, self._channel, copier)
            )
        except RuntimeError:
            arena.close()
            ring.close()
            raise
        self._remote = Remote(name, arena, self._way.clock, drain_timeout, self._is_hung_up)
        self._lock = self._remote.lock

    @property
    def epoch(self) -> int:
        """Of the peer's registration, as it is known here."""
        return self._remote.arena.epoch

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the peer's memory that are mapped here."""
        return self._remote.arena.mapped_bytes

    @property
    def in_flight(self) -> int:
        """Transfers under way."""
        return self._remote.in_flight

    @property
    def arena_base(self) -> int:
        """The peer's own address of its arena."""
        return self._remote.arena.peer_base

    @property
    def gone(self) -> str | None:
        """Why it cannot be written to any more."""
        return self._remote.gone

    @property
    def is_live(self) -> bool:
        """Whether it can be written to, as far as its end of the connection tells."""
        return self.gone is None and not self._is_hung_up()

    def listen(self) -> None:
        """Follow what the peer says from now on."""
        self._channel.start()

    def offer(self, about: dict[str, Any], timeout: float) -> bool:
        """Let the peer map our arena, so that it can pull; whether it has within `timeout` seconds."""
        follower = Follower(self.name, self._channel)
        self._follower = follower
        self._send(Kind.OFFER, about)
        return self._followers.add(follower, lambda: self.gone is not None, timeout)

    def wait_for_epoch(self, epoch: int, timeout: float) -> bool:
        """See `Remote.wait_for_epoch`."""
        return self._remote.wait_for_epoch(epoch, timeout)

    def spans(self, src: Int64, dst: Int64, lengths: Int64, after: int | None) -> SameHostPending:
        """Start to write ranges; raises `TransferFailed`."""
        remote, count = self._remote, dst.size
        with self._lock:
            remote.require(count)
            self._require_here(src, lengths)
            self._require_there(dst, lengths)
            try:
                pending = self._way.spans(remote, src, dst, lengths, after)
            except RuntimeError as error:
                raise self._failure("copy", str(error), count) from error
        return pending

    def pages(
        self,
        src_base: int,
        src: Int64,
        dst_base: int | None,
        dst: Int64,
        page_bytes: int,
        lease: PageLease,
        sub_pool: str,
        after: int | None,
    ) -> SameHostPending:
        """Start to write leased pages; raises `TransferFailed` or `LeaseError`, and tells the receiver."""
        remote, count = self._remote, dst.size
        with self._lock:
            try:
                if remote.gone is not None:
                    remote.require(count)
                ours, arena = self._ours.intervals, remote.arena
                # One bound, cached, answers for nearly every pool: all from page 0 on is registered.
                if highest(src) >= self._own_bounds.pages(
                    ours, src_base, page_bytes
                ) and not ours.covers_pages(src_base, src, page_bytes):
                    raise self._failure("EINVAL", "source pages are not registered here", count)
                base = arena.peer_base if dst_base is None else dst_base
                part = self._leases.take(lease, sub_pool, dst)
                intervals = arena.intervals
                # If all pages of the lease are in bounds, these are, too.
                if count and (
                    part.high >= self._bounds.pages(intervals, base, page_bytes)
                    and not intervals.covers_pages(base, dst, page_bytes)
                ):
                    raise self._unregistered(base, page_bytes, count)
                pending = self._way.pages(
                    remote, src_base, src, base, dst, page_bytes, lease, sub_pool, part, after
                )
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
        return pending

    def admit(self, lease: PageLease) -> None:
        """Get to know a lease before its first page is written, and tell the receiver who will write it."""
        # First, as whoever writes under an admitted lease need not say so any more.
        self._send(Kind.ADMITTED, {"request": lease.request, "serial": lease.serial})
        with self._lock:
            self._leases.admit(lease)

    def give_up(self, lease: PageLease, why: str) -> None:
        """Tell the receiver at once that these pages will not come."""
        with self._lock:
            self._leases.end((lease.request, lease.serial), f"was given up: {why}")
        self._send(Kind.FAILED, {"request": lease.request, "serial": lease.serial, "why": why[:1000]})

    def close(self, why: str) -> None:
        """Detach: wait for what is under way, unmap, and end the connection. Never raises."""
        with self._lock:
            self._remote.gone = self._remote.gone or why
            self._remote.drain(self._drain_timeout)
        self._channel.close(why)

    def handle(self, packet: Packet) -> None:
        """Follow one packet of the peer; after an error (`WireError`, `HandleImportError`) close it."""
        if packet.kind is Kind.EXPORT:
            epoch = self._remote.follow(packet)
            if epoch is not None:
                self._send(Kind.MAPPED, {"epoch": epoch})
            return
        packet.close_fds()
        if packet.kind is Kind.REVOKE:
            self._revoke(packet)
        elif packet.kind is Kind.MAPPED and self._follower is not None:
            self._followers.answered(self._follower, field(packet.body, "epoch", int))
        elif packet.kind is Kind.REFUSE:
            self._channel.close(f"it refused ({packet.body.get('code')}): {packet.body.get('why')}")
        else:
            raise WireError(f"a receiver sent {packet.kind.name}")

    def drain(self, timeout: float) -> bool:
        """Wait for what is under way now; whether it has ended."""
        return self._remote.drain(timeout)

    def _is_hung_up(self) -> bool:
        return self._channel.is_hung_up

    def _revoke(self, packet: Packet) -> None:
        key = (field(packet.body, "request", str), field(packet.body, "serial", int))
        with self._lock:
            self._leases.end(key, "was revoked")
            self._remote.drained()
        self._send(Kind.REVOKED, {"request": key[0], "serial": key[1]})

    def _send(self, kind: Kind, body: dict[str, Any]) -> None:
        try:
            self._channel.send(kind, body)
        except ChannelClosed:
            _log.debug("%s was not told %s: it is gone", self.name, kind.name)

    def _end(self, reason: str) -> None:
        if self._remote.end(reason, self._way.stop):
            self._way.close()
            self._ring.close()
        if self._follower is not None:
            self._followers.remove(self._follower)
        self._on_gone(self)

    def _require_here(self, starts: Int64, lengths: Int64) -> None:
        outside = _outside(self._ours.intervals, starts, lengths)
        if outside is not None:
            where = f"{int(lengths[outside])} bytes at {int(starts[outside]):#x} here"
            raise self._failure("EINVAL", f"{where} are not registered", starts.size)

    def _require_there(self, starts: Int64, lengths: Int64) -> None:
        outside = _outside(self._remote.arena.intervals, starts, lengths)
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
