"""Transfers under way on the sender's side, and all of them that go to one peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from kvarena.transfer._copy import Ticket
from kvarena.transfer.errors import TransferFailed, TransferTimeout

__all__ = ["Flights", "SameHostPending"]


@final
class Flights:
    """The transfers to one peer that have not ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._flying: set[SameHostPending] = set()

    def __len__(self) -> int:
        return len(self._flying)

    def add(self, pending: SameHostPending) -> None:
        """One more."""
        with self._changed:
            self._flying.add(pending)

    def remove(self, pending: SameHostPending) -> None:
        """One less."""
        with self._changed:
            self._flying.discard(pending)
            if not self._flying:
                self._changed.notify_all()

    def doom(self, why: str) -> None:
        """Whatever is under way counts as failed, even if its bytes still arrive."""
        with self._changed:
            for pending in self._flying:
                pending.doom(why)

    def drain(self, timeout: float, key: object = None) -> bool:
        """Wait until all that is under way now (`key`: of that lease) has ended; whether it has."""
        with self._changed:
            waiting = [p for p in self._flying if key is None or p.key == key]
        deadline = time.monotonic() + timeout
        return all(pending.settle(deadline - time.monotonic()) for pending in waiting)


@final
class SameHostPending:
    """See `kvarena.transfer.Pending`.

    Parameters
    ----------
    peer : str
        To whom.
    operations : int
        Pages or ranges, for messages.
    key : tuple of (str, int), optional
        The lease that it is written under.
    on_end : callable, optional
        Called once, with the failure or None, before anyone is told.
    """

    __slots__ = (
        "_doomed",
        "_error",
        "_flights",
        "_on_end",
        "_operations",
        "_peer",
        "_state",
        "_ticket",
        "key",
    )

    def __init__(
        self,
        flights: Flights,
        peer: str,
        operations: int,
        key: tuple[str, int] | None = None,
        on_end: Callable[[TransferFailed | None], None] | None = None,
    ) -> None:
        self._flights = flights
        self._peer = peer
        self._operations = operations
        self.key = key
        self._on_end = on_end
        self._ticket: Ticket | None = None
        self._doomed: str | None = None
        self._error: TransferFailed | None = None
        self._state = False
        flights.add(self)

    def started(self, ticket: Ticket) -> None:
        """The copy is under way."""
        self._ticket = ticket

    def abandon(self) -> None:
        """The copy could not be started."""
        self._flights.remove(self)

    def doom(self, why: str) -> None:
        """Count as failed when the copy ends."""
        self._doomed = why

    def ended(self, error: BaseException | None) -> None:
        """The copy has ended; called by the copier, once."""
        why = self._doomed or (str(error) if error is not None else None)
        if why is not None:
            code = "peer" if self._doomed else "copy"
            request = self.key[0] if self.key else None
            self._error = TransferFailed(
                "same-host", self._peer, code, why, operations=self._operations, request=request
            )
        try:
            if self._on_end is not None:
                self._on_end(self._error)
        finally:
            self._state = True
            self._flights.remove(self)

    def settle(self, timeout: float | None) -> bool:
        """Wait for the end, good or bad; whether it came."""
        ticket = self._ticket
        return self._state or (ticket is not None and ticket.wait(timeout))

    def done(self) -> bool:
        """See `Pending.done`."""
        ticket = self._ticket
        if not self._state and (ticket is None or not ticket.poll()):
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: float | None = None) -> None:
        """See `Pending.wait`."""
        if not self.settle(timeout):
            raise TransferTimeout(
                "same-host", self._peer, timeout or 0.0, request=self.key[0] if self.key else None
            )
        if self._error is not None:
            raise self._error
