"""Copies to one receiver: its arena, mapped here, and what is under way to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final

from kvarena.transfer._batch import PageBatch
from kvarena.transfer.errors import TransferFailed
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.channel import Channel
from kvarena.transfer.same_host.copy.clock import Copier, Signal
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.mapped_arena import MappedArena
from kvarena.transfer.same_host.pending import SameHostPending
from kvarena.transfer.same_host.sent_leases import LeasedPart
from kvarena.transfer.same_host.tickets import Tickets
from kvarena.transfer.same_host.wire import Packet

__all__ = ["Push"]

_log = logging.getLogger(__name__)


@final
class Push:
    """Writes into a receiver's arena, follows what the receiver exports, and unmaps nothing that is written.

    Parameters
    ----------
    name : str
        Of the receiver.
    arena : MappedArena
        The receiver's; owned from now on, as is the ring of `tickets`.
    tickets : Tickets
        In which finished copies are counted.
    copier : Copier
        Ours, shared by all receivers.
    channel : Channel
        To the receiver.
    drain_timeout : float
        Seconds that copies under way may take; after that the memory beneath them stays mapped.

    Raises
    ------
    RuntimeError
        Our device cannot write to the memory of the ring; it is closed then, like `arena`.
    """

    def __init__(
        self,
        name: str,
        arena: MappedArena,
        tickets: Tickets,
        copier: Copier,
        channel: Channel,
        drain_timeout: float,
    ) -> None:
        self.name = name
        self.arena = arena
        self._tickets = tickets
        self._ring = tickets.ring
        self._copier = copier
        self._channel = channel
        self._drain_timeout = drain_timeout
        # Held while a copy is checked and started, so that no region goes and no lease ends in between.
        self.lock = threading.RLock()
        self.moved = threading.Condition(self.lock)
        self.gone: str | None = None
        self._flying: deque[int] = deque()
        self._good_until: int | None = None
        self._is_let_go = False
        try:
            self._word = copier.adopt(self._ring.address, self._ring.nbytes)
        except RuntimeError:
            arena.close()
            self._ring.close()
            raise

    @property
    def in_flight(self) -> int:
        """Copies under way."""
        with self.lock:
            self._forget_ended()
            return len(self._flying)

    def pages(
        self, batch: PageBatch, src: Int64, dst: Int64, bases: tuple[int, int], part: LeasedPart
    ) -> int:
        """Start writing leased pages, and answer the copy's number; the caller has the lock.

        Parameters
        ----------
        src, dst : Int64
            Page ids of `batch`, checked.
        bases : (int, int)
            Addresses of page 0 here and in the receiver's process.
        part : LeasedPart
            What of the lease they are.

        Raises
        ------
        TransferFailed, RuntimeError
            Nothing was started.
        """
        count, copier, arena = dst.size, self._copier, self.arena
        signal: Signal | None = None
        ticket = 0
        if count:
            tickets, word, fail = self._tickets, self._word, self._ring.fail
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
            number = copier.copy_pages(
                bases[0], bases[1] + arena.shift, src, dst, batch.page_bytes, signal, batch.after
            )
        except BaseException:
            if ticket:
                self._ring.take_back(ticket)
            raise
        self._started(number)
        return number

    def spans(self, src: Int64, dst: Int64, lengths: Int64, after: int | None) -> int:
        """Start writing ranges, and answer the copy's number; the caller has the lock. `RuntimeError`."""
        number = self._copier.copy_spans(src, dst + self.arena.shift, lengths, None, after)
        self._started(number)
        return number

    def pending(self, number: int, operations: int, request: str | None = None) -> SameHostPending:
        """What ends with that copy."""
        return SameHostPending(self._copier, number, self, operations, request)

    def look(self, number: int) -> None:
        """See `Receiver.look`."""
        if self.gone is None and self._channel.is_hung_up:
            with self.lock:
                self.gone = self.gone or "it closed the connection, or died"
                if self._good_until is None:
                    self._good_until = number - 1

    def loss(self, number: int) -> str | None:
        """See `Receiver.loss`."""
        if self._good_until is None or number <= self._good_until:
            return None
        return self.gone

    def require(self, operations: int) -> None:
        """Raise `TransferFailed` if the receiver is gone."""
        if self.gone is not None:
            raise TransferFailed("same-host", self.name, "peer", self.gone, operations=operations)

    def follow(self, packet: Packet) -> int | None:
        """Do what an EXPORT packet says; the epoch, once an update is whole.

        Raises
        ------
        WireError, HandleImportError, TransferFailed
            The connection must end.
        """
        with self.moved:
            try:
                more = self.arena.stage(packet)
            except WireError:
                packet.close_fds()
                raise
            if more:
                return None
            try:
                self.arena.commit(self.drained)
            except TransferFailed as error:
                self.gone = self.gone or str(error)
                raise
            self.moved.notify_all()
            return self.arena.epoch

    def wait_for_epoch(self, epoch: int, timeout: float) -> bool:
        """Whether the receiver's registration of that epoch is known here within `timeout` seconds."""
        with self.moved:
            return self.moved.wait_for(
                lambda: self.arena.epoch >= epoch or self.gone is not None, timeout
            ) and (self.gone is None)

    def drain(self, timeout: float) -> bool:
        """Wait for what is under way now, well or badly; whether it has ended."""
        deadline = time.monotonic() + timeout
        with self.lock:
            self._forget_ended()
            return all(self._wait(number, deadline - time.monotonic()) for number in self._flying)

    def drained(self) -> None:
        """The same with the usual patience; raises `TransferFailed`."""
        if not self.drain(self._drain_timeout):
            raise TransferFailed("same-host", self.name, "copy", f"not done within {self._drain_timeout:g} s")

    def end(self, reason: str) -> None:
        """The receiver is gone: let its memory and the ring go, unless a copy still uses them."""
        with self.moved:
            self.gone = self.gone or reason
            if self._good_until is None:
                self._forget_ended()
                self._good_until = self._flying[0] - 1 if self._flying else 1 << 62
            if not (self.drain(self._drain_timeout) and self.let_go()):
                _log.error(
                    "%d copies of %s did not end within %g s: its memory stays mapped",
                    len(self._flying),
                    self.name,
                    self._drain_timeout,
                )
            self.moved.notify_all()

    def let_go(self) -> bool:
        """Unmap the memory of a receiver that is gone, if no copy uses it any more; whether that is so."""
        with self.lock:
            self._forget_ended()
            if self._flying:
                return False
            if not self._is_let_go:
                self._is_let_go = True
                self.arena.close()
                self._copier.disown(self._ring.address)
                self._ring.close()
            return True

    def _started(self, number: int) -> None:
        self._flying.append(number)
        if len(self._flying) > 64:
            self._forget_ended()

    def _wait(self, number: int, timeout: float) -> bool:
        try:
            return self._copier.wait(number, timeout)
        except RuntimeError:
            return True  # it will never be good

    def _forget_ended(self) -> None:
        flying = self._flying
        while flying and self._has_ended(flying[0]):
            flying.popleft()

    def _has_ended(self, number: int) -> bool:
        try:
            return self._copier.has_ended(number)
        except RuntimeError:
            return True
