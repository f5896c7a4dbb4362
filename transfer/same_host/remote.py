"""A peer's arena as it is known here, and the copies to or from it that are under way."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final

from kvarena.transfer.errors import TransferFailed
from kvarena.transfer.same_host.copy.clock import Clock
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.mapped_arena import MappedArena
from kvarena.transfer.same_host.wire import Packet

__all__ = ["Remote"]

_log = logging.getLogger(__name__)


@final
class Remote:
    """Follows what the peer exports, and lets nothing go that is being copied.

    Parameters
    ----------
    name : str
        Of the peer.
    arena : MappedArena
        Owned from now on.
    clock : Clock
        Of the copies.
    drain_timeout : float
        Seconds that copies under way may take; after that the memory beneath them stays mapped.
    is_hung_up : callable
        Whether the peer's end of the connection is closed.
    """

    def __init__(
        self,
        name: str,
        arena: MappedArena,
        clock: Clock,
        drain_timeout: float,
        is_hung_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.arena = arena
        self._clock = clock
        self._drain_timeout = drain_timeout
        # Held while a copy is checked and started, so that no region goes and no lease ends in between.
        self.lock = threading.RLock()
        self.moved = threading.Condition(self.lock)
        self.gone: str | None = None
        self._flying: deque[int] = deque()
        self._good_until: int | None = None
        self._is_hung_up = is_hung_up

    @property
    def in_flight(self) -> int:
        """Copies under way."""
        with self.lock:
            self._forget_ended()
            return len(self._flying)

    def started(self, number: int) -> None:
        """A copy is under way; the caller has the lock."""
        self._flying.append(number)
        if len(self._flying) > 64:
            self._forget_ended()

    def look(self, number: int) -> None:
        """See `To.look`."""
        if self.gone is None and self._is_hung_up():
            with self.lock:
                self.gone = self.gone or "it closed the connection, or died"
                if self._good_until is None:
                    self._good_until = number - 1

    def loss(self, number: int) -> str | None:
        """See `To.loss`."""
        if self._good_until is None or number <= self._good_until:
            return None
        return self.gone

    def require(self, operations: int) -> None:
        """Raise `TransferFailed` if it is gone."""
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
        """Whether the peer's registration of that epoch is known here within `timeout` seconds."""
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

    def end(self, reason: str, stop: Callable[[], None] | None = None) -> bool:
        """It is gone: let its memory go, when nothing is copied; whether that is so.

        `stop`: called before waiting, where the peer made the copies.
        """
        with self.moved:
            self.gone = self.gone or reason
            if self._good_until is None:
                self._forget_ended()
                self._good_until = self._flying[0] - 1 if self._flying else 1 << 62
            if stop is not None:
                stop()
            drained = self.drain(self._drain_timeout)
            if drained:
                self.arena.close()
            else:
                _log.error(
                    "%d copies of %s did not end within %g s: its memory stays mapped",
                    len(self._flying),
                    self.name,
                    self._drain_timeout,
                )
            self.moved.notify_all()
            return drained

    def _wait(self, number: int, timeout: float) -> bool:
        try:
            return self._clock.wait(number, timeout)
        except RuntimeError:
            return True  # it will never be good

    def _forget_ended(self) -> None:
        flying = self._flying
        while flying and self._has_ended(flying[0]):
            flying.popleft()

    def _has_ended(self, number: int) -> bool:
        try:
            return self._clock.has_ended(number)
        except RuntimeError:
            return True
