"""A gate that counts transfers in flight, and can be closed until none is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvarena.transfer.errors import QuiesceTimeout

__all__ = ["Quiesce"]


class Quiesce:
    """Who moves pages enters; who must replace a registration closes, for a bounded time.

    A sender enters for each submitted transfer, a receiver for each lease that it granted. Any
    thread may leave for any other.
    """

    __slots__ = ("_changed", "_closers", "_in_flight")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_flight = 0
        self._closers = 0

    @property
    def in_flight(self) -> int:
        """How many have entered and not left."""
        return self._in_flight

    def enter(self, timeout: float = 30.0) -> None:
        """Count one more in flight; waits while the gate is closed.

        Raises
        ------
        QuiesceTimeout
            It stayed closed for `timeout` seconds; nothing was counted.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closers == 0, timeout):
                raise QuiesceTimeout(
                    "The transfer gate did not open",
                    in_flight=self._in_flight,
                    seconds=timeout,
                    fix="A registration is being replaced; try again.",
                )
            self._in_flight += 1

    def leave(self) -> None:
        """Count one less."""
        with self._changed:
            if self._in_flight == 0:
                raise RuntimeError("left a gate that nothing had entered")
            self._in_flight -= 1
            self._changed.notify_all()

    @contextmanager
    def transfer(self, timeout: float = 30.0) -> Iterator[None]:
        """Enter, and leave at the end of the block."""
        self.enter(timeout)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def closed(self, timeout: float = 30.0) -> Iterator[None]:
        """Keep newcomers out, wait until nothing is in flight, and open again after the block.

        Raises
        ------
        QuiesceTimeout
            Something was still in flight after `timeout` seconds; the gate is open again.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closers += 1
            try:
                if not self._changed.wait_for(lambda: self._in_flight == 0, deadline - time.monotonic()):
                    raise QuiesceTimeout(
                        "Transfers did not drain",
                        in_flight=self._in_flight,
                        seconds=timeout,
                        fix="Raise the quiesce timeout, or disconnect the peer that hangs.",
                    )
            except BaseException:
                self._open()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._open()

    def _open(self) -> None:
        self._closers -= 1
        self._changed.notify_all()
