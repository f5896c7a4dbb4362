"""Copies that the sender makes: it writes into the receiver's arena, and the receiver sees them counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from kvarena.transfer.errors import TransferFailed
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.channel import Channel, ChannelClosed
from kvarena.transfer.same_host.copy.clock import Clock, Copier, Signal
from kvarena.transfer.same_host.pending import SameHostPending
from kvarena.transfer.same_host.remote import Remote
from kvarena.transfer.same_host.ring import RECORDS, Ring
from kvarena.transfer.same_host.sent_leases import LeasedPart, PageLease
from kvarena.transfer.same_host.wire import Kind

__all__ = ["Push", "Tickets"]

_NO_LEASE = bytes(16)


@final
class Tickets:
    """Numbers of a ring, for a sender: there is always room, or the receiver is asked to make some.

    Parameters
    ----------
    name : str
        Of the receiver.
    ring : Ring
    channel : Channel
        To the receiver.
    patience : float
        Seconds that it may take to read.
    """

    def __init__(self, name: str, ring: Ring, channel: Channel, patience: float) -> None:
        self.ring = ring
        self._name = name
        self._channel = channel
        self._patience = patience

    def begin(self, epoch: int, digest: bytes = _NO_LEASE, part: int = 0, pages: int = 0) -> int:
        """See `Ring.begin`. Raises `TransferFailed` if the receiver does not read."""
        self.make_room(pages)
        return self.ring.begin(digest, part, pages, epoch)

    def make_room(self, operations: int) -> None:
        """The next record has a place. Raises `TransferFailed` if the receiver does not read."""
        if self.ring.unread >= RECORDS:
            self._wait_for_room(operations)

    def remind(self) -> None:
        """Half of the ring is unread: ask in time."""
        if self.ring.unread * 2 == RECORDS:
            self._ask()

    def _wait_for_room(self, operations: int) -> None:
        deadline = time.monotonic() + self._patience
        while self.ring.unread >= RECORDS:
            if not self._channel.is_open or time.monotonic() > deadline:
                why = f"it leaves {RECORDS} finished copies unread"
                raise TransferFailed("same-host", self._name, "peer", why, operations=operations)
            self._ask()
            time.sleep(1e-3)

    def _ask(self) -> None:
        try:
            self._channel.send(Kind.COLLECT, {})
        except ChannelClosed:
            return  # its end is on its way


@final
class Push:
    """A way from this process to a receiver whose arena is mapped here. The caller has the peer's lock.

    Raises
    ------
    RuntimeError
        Our device cannot write to the memory of the ring.
    """

    def __init__(self, tickets: Tickets, copier: Copier) -> None:
        self._tickets = tickets
        self._copier = copier
        self._ring = tickets.ring
        self._fail = tickets.ring.fail
        self._word = copier.adopt(self._ring.address, self._ring.nbytes)

    @property
    def clock(self) -> Clock:
        """Of its copies."""
        return self._copier

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
        """Write leased pages; raises `TransferFailed` or `RuntimeError`."""
        count, copier, arena = dst.size, self._copier, remote.arena
        signal: Signal | None = None
        ticket = 0
        if count:
            tickets, word, fail = self._tickets, self._word, self._fail
            tickets.make_room(count)
            begin = tickets.ring.begin
            if part.is_announced:  # then the record can wait until the copy runs
                digest, index, epoch = part.digest, part.index, arena.epoch

                def signal() -> tuple[int, int, Callable[[int], None]]:
                    return word, begin(digest, index, count, epoch), fail
            else:
                ticket = begin(part.digest, part.index, count, arena.epoch)

                def signal() -> tuple[int, int, Callable[[int], None]]:
                    return word, ticket, fail

        try:
            number = copier.copy_pages(src_base, dst_base + arena.shift, src, dst, page_bytes, signal, after)
        except BaseException:
            if ticket:
                self._ring.take_back(ticket)
            raise
        remote.started(number)
        return SameHostPending(copier, number, remote, count, lease.request)

    def spans(
        self, remote: Remote, src: Int64, dst: Int64, lengths: Int64, after: int | None
    ) -> SameHostPending:
        """Write ranges; raises `RuntimeError`."""
        number = self._copier.copy_spans(src, dst + remote.arena.shift, lengths, None, after)
        remote.started(number)
        return SameHostPending(self._copier, number, remote, dst.size)

    def stop(self) -> None:
        """The receiver is gone: what has begun ends all the same."""

    def close(self) -> None:
        """Nothing is being copied any more."""
        self._copier.disown(self._ring.address)
