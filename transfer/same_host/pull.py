"""Copies that the receiver makes: it reads the sender's arena, at the sender's word, under its own lease."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from kvarena.transfer.errors import LeaseError, TransferError, TransferFailed
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.channel import Channel, ChannelClosed
from kvarena.transfer.same_host.copy.clock import Clock, Copier, Signal, await_clock
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.exports import Exports
from kvarena.transfer.same_host.incoming import IncomingTable
from kvarena.transfer.same_host.mapped_arena import MappedArena
from kvarena.transfer.same_host.pending import SameHostPending
from kvarena.transfer.same_host.push import Tickets
from kvarena.transfer.same_host.remote import Remote
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sent_leases import LeasedPart, PageLease
from kvarena.transfer.same_host.wire import Kind, Packet, field, packed, unpacked

__all__ = ["Pull", "Puller"]

# Ids of one packet; two or three lists of them stay far below a packet's limit.
_BATCH = 1024


@final
class Pull:
    """A way from this process to a receiver that reads; its own clock. The caller has the peer's lock."""

    def __init__(self, tickets: Tickets, channel: Channel, copier: Copier) -> None:
        self._tickets = tickets
        self._ring = tickets.ring
        self._channel = channel
        self._copier = copier
        self._stopped = False

    @property
    def clock(self) -> Clock:
        """Of its copies."""
        return self

    def has_ended(self, number: int) -> bool:
        """See `Clock.has_ended`."""
        if self._stopped:
            return True
        if number and self._ring.has_failed(number):
            raise RuntimeError("the receiver could not, or would not, copy it")
        return self._ring.ended >= number

    def wait(self, number: int, timeout: float | None) -> bool:
        """See `Clock.wait`."""
        return await_clock(self.has_ended, number, timeout)

    def stop(self) -> None:
        """The receiver is gone: whatever has not ended never will."""
        self._stopped = True

    def pages(
        self,
        remote: Remote,
        src_base: int,
        src: Int64,
        dst_base: int,
        dst: Int64,
        page_bytes: int,
        lease: PageLease,
        sub_pool: str,
        part: LeasedPart,
        after: int | None,
    ) -> SameHostPending:
        """Ask for leased pages; raises `TransferFailed` or `RuntimeError`."""
        self._settle(after)
        about = {
            "request": lease.request,
            "serial": lease.serial,
            "sub_pool": sub_pool,
            "src_base": src_base,
            "dst_base": dst_base,
            "page_bytes": page_bytes,
        }
        first = number = 0
        for start in range(0, dst.size, _BATCH):
            batch = slice(start, start + _BATCH)
            lists = {"src": packed(src[batch]), "dst": packed(dst[batch])}
            number = self._tickets.begin(remote.arena.epoch, part.digest, part.index, dst[batch].size)
            first = first or number
            self._ask(remote, {**about, **lists, "number": number, "first": first}, dst.size)
        return SameHostPending(self, number, remote, dst.size, lease.request)

    def spans(
        self, remote: Remote, src: Int64, dst: Int64, lengths: Int64, after: int | None
    ) -> SameHostPending:
        """Ask for ranges; raises `TransferFailed` or `RuntimeError`."""
        self._settle(after)
        first = number = 0
        for start in range(0, dst.size, _BATCH):
            batch = slice(start, start + _BATCH)
            lists = {
                name: packed(values[batch])
                for name, values in (("src", src), ("dst", dst), ("lengths", lengths))
            }
            number = self._tickets.begin(remote.arena.epoch)
            first = first or number
            self._ask(remote, {**lists, "number": number, "first": first}, dst.size)
        return SameHostPending(self, number, remote, dst.size)

    def close(self) -> None:
        """Nothing is being copied any more."""

    def _settle(self, after: int | None) -> None:
        """The receiver cannot wait for a stream of ours."""
        if after is not None:
            self._copier.settle(after)

    def _ask(self, remote: Remote, body: dict[str, Any], operations: int) -> None:
        try:
            self._channel.send(Kind.PULL, body)
        except ChannelClosed as error:
            self._ring.take_back(body["number"])
            raise TransferFailed(
                "same-host", remote.name, "peer", "it is gone", operations=operations
            ) from error
        remote.started(body["number"])


@final
class Puller:
    """The receiver's side: the sender's arena, mapped here, and the copies from it.

    Parameters
    ----------
    name : str
        Of the sender.
    arena : MappedArena
        The sender's; owned from now on.
    copier : Copier
    ours : Exports
        What may be written.
    incoming : IncomingTable
        Knows our leases.
    ring : Ring
        Where the end of copies is counted.
    drain_timeout : float
        As for `Remote`.

    Raises
    ------
    RuntimeError
        Our device cannot write to the memory of `ring`.
    """

    def __init__(
        self,
        name: str,
        arena: MappedArena,
        copier: Copier,
        ours: Exports,
        incoming: IncomingTable,
        ring: Ring,
        drain_timeout: float,
    ) -> None:
        self._name = name
        self._copier = copier
        self._ours = ours
        self._incoming = incoming
        self._ring = ring
        self._last = 0
        # The last copies that were not started, and that broke in the copier's thread.
        self._refused = self._broken = 0
        self.remote = Remote(name, arena, copier, drain_timeout)
        try:
            self._word = copier.adopt(ring.address, ring.nbytes)
        except RuntimeError:
            arena.close()
            raise

    def pull(self, packet: Packet) -> None:
        """Copy what a packet asks for, or let the sender know that it will not come.

        Raises
        ------
        WireError
            It makes no sense.
        """
        body = packet.body
        number, first = field(body, "number", int), field(body, "first", int)
        if number != self._last + 1 or not 0 < first <= number:
            raise WireError(f"copy {number} was asked for after copy {self._last}")
        self._last = number
        key = None
        if "lengths" not in body:
            key = (field(body, "request", str), field(body, "serial", int))
        try:
            with self.remote.lock:
                if max(self._refused, self._broken) >= first:
                    raise self._failure("an earlier part of it failed")
                signal = lambda: (self._word, number, self._break)  # noqa: E731
                started = self._spans(body, signal) if key is None else self._pages(body, key, signal)
                self.remote.started(started)
        except WireError:
            self._ring.fail(number)
            raise
        except (TransferError, RuntimeError) as error:
            self._refused = number
            self._ring.fail(number)
            if key is not None and not isinstance(error, LeaseError):
                self._incoming.failed(self._name, key, str(error))

    def end(self, reason: str) -> None:
        """The sender is gone: let its memory go when nothing is copied from it."""
        if self.remote.end(reason):
            self._copier.disown(self._ring.address)

    def _break(self, number: int) -> None:
        self._broken = number
        self._ring.fail(number)

    def _pages(self, body: dict[str, Any], key: tuple[str, int], signal: Signal) -> int:
        src, dst = unpacked(body, "src"), unpacked(body, "dst")
        src_base, dst_base = field(body, "src_base", int), field(body, "dst_base", int)
        page_bytes, arena = field(body, "page_bytes", int), self.remote.arena
        if not 0 < src.size == dst.size or not page_bytes:
            raise WireError(f"{src.size} pages onto {dst.size} of {page_bytes} bytes")
        self.remote.require(dst.size)
        if not arena.intervals.covers_pages(src_base, src, page_bytes):
            raise self._failure("source pages are not registered there")
        if not self._ours.intervals.covers_pages(dst_base, dst, page_bytes):
            raise self._failure("destination pages are not registered here")
        self._incoming.take(self._name, key, field(body, "sub_pool", str), dst)
        return self._copier.copy_pages(src_base + arena.shift, dst_base, src, dst, page_bytes, signal)

    def _spans(self, body: dict[str, Any], signal: Signal) -> int:
        src, dst, lengths = (unpacked(body, name) for name in ("src", "dst", "lengths"))
        if not src.size == dst.size == lengths.size or int(lengths.min(initial=0)) < 0:
            raise WireError(f"{src.size} sources, {dst.size} destinations, {lengths.size} lengths")
        arena = self.remote.arena
        self.remote.require(dst.size)
        for intervals, starts in ((arena.intervals, src), (self._ours.intervals, dst)):
            if intervals.first_outside(starts, lengths) is not None:
                raise self._failure("a range is not registered")
        return self._copier.copy_spans(np.add(src, arena.shift), dst, lengths, signal)

    def _failure(self, why: str) -> TransferFailed:
        return TransferFailed("same-host", self._name, "EFAULT", why)
