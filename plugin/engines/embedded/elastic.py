"""A pool that grows and gives back between two steps of a server, while requests are served."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.config import FULL, WINDOW
from kvarena.plugin.engines.embedded.control import Grow, Resized, Shrink
from kvarena.pool.errors import AllocatorError, PoolSizeError
from kvarena.transfer import LeaseTable, QuiesceTimeout

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine

__all__ = ["Elastic", "GrowthCounts", "NotNow"]


class NotNow(KvArenaError):
    """A change that work under way stands against; the server ends that work and tries again."""


class GrowthCounts(msgspec.Struct):
    """What an elastic pool has been through."""

    grown: int = 0
    shrunk: int = 0
    refused: int = 0
    """Changes that could not be made."""
    waited: int = 0
    """Changes that had to wait for leases, transfers or sequences to end."""
    in_flight: int = 0
    """Leases and transfers that were out at the moment of a change, of all changes together."""


class Elastic:
    """Carries out one change of the pool's size after the other, without blocking the server.

    A change that transfers or leases stand against is tried at each step. Meanwhile `holding` is set:
    the server begins nothing new, so what stands in the way ends by itself. A step takes as long as
    the change itself, and never waits for a peer's work: everything that a peer could still be
    writing to has been found free before.

    Parameters
    ----------
    engine : Engine
        Finalized.
    leases : LeaseTable, optional
        The pages that peers may write, on the side that has granted any.
    """

    def __init__(self, engine: Engine, leases: LeaseTable | None = None) -> None:
        self._engine = engine
        self._leases = leases
        self._asked: deque[Grow | Shrink] = deque()
        self._began: float | None = None
        self._tries = 0
        # Memory goes back in the portions in which it came: a handle cannot be cut.
        self._sizes: list[int] = []
        self.holding = False
        """Whether the server must begin nothing that pins pages."""
        self.counts = GrowthCounts()

    @property
    def busy(self) -> bool:
        """Whether a change waits to be made."""
        return bool(self._asked)

    def ask(self, change: Grow | Shrink) -> None:
        """Make a change in a later step, after those that were asked for before."""
        self._asked.append(change)

    def step(self) -> list[Resized]:
        """Try the next change; returns what became of it, or nothing as long as it has to wait."""
        if not self._asked:
            return []
        change = self._asked[0]
        if self._began is None:
            self._began = time.monotonic()
        self._tries += 1
        in_flight = self._engine.ledger.gate.in_flight
        began = time.monotonic()
        error = ""
        try:
            self._make(change)
        except NotNow as failure:
            if began - self._began < change.limit_s:
                self.holding = True
                return []
            error = f"{failure} It was so for {change.limit_s:g} s."
        except KvArenaError as failure:
            error = str(failure)
        ended = time.monotonic()
        self._count(change, in_flight, error)
        resized = Resized(
            grown=isinstance(change, Grow),
            total_bytes=self._engine.pool.total_bytes,
            in_flight=in_flight,
            tries=self._tries,
            waited_ms=(began - self._began) * 1e3,
            milliseconds=(ended - began) * 1e3,
            error=error,
        )
        self._asked.popleft()
        self._began, self._tries, self.holding = None, 0, False
        return [resized]

    def _make(self, change: Grow | Shrink) -> None:
        ledger = self._engine.ledger
        if not ledger.engine.capabilities.live_reregistration and ledger.gate.in_flight:
            # Its regions can only be replaced, and that would wait here, where the transfers are polled.
            raise NotNow(f"{ledger.gate.in_flight} transfers are under way.")
        if isinstance(change, Grow):
            self._grow(change.nbytes)
        else:
            self._shrink()
        self._engine.check()

    def _grow(self, nbytes: int) -> None:
        engine = self._engine
        before = engine.pool.total_bytes
        engine.lifecycle.grow(before + nbytes, engine.allocator)
        self._sizes.append(before)

    def _shrink(self) -> None:
        engine = self._engine
        if not self._sizes:
            raise KvArenaError("the pool has nothing to give back.", fix="Let it grow first.")
        size = self._sizes[-1]
        if not engine.book.fits(size):
            raise NotNow(f"the sequences that run were promised more than {size} bytes.")
        try:
            with self._without_tail(size):
                engine.lifecycle.shrink(size, engine.allocator)
        except (AllocatorError, PoolSizeError, QuiesceTimeout) as error:
            raise NotNow(str(error)) from error
        self._sizes.pop()

    def _without_tail(self, size: int) -> _Tail:
        pool = self._engine.pool
        return _Tail(self._leases, {name: size // pool.page_bytes(name) for name in (FULL, WINDOW)})

    def _count(self, change: Grow | Shrink, in_flight: int, error: str) -> None:
        counts = self.counts
        counts.refused += bool(error)
        counts.waited += self._tries > 1
        if not error:
            counts.in_flight += in_flight
            counts.grown += isinstance(change, Grow)
            counts.shrunk += isinstance(change, Shrink)
        self._engine.note(growth=msgspec.to_builtins(counts))


class _Tail:
    """While it is held, no lease is granted in the tail, and none is out there."""

    def __init__(self, leases: LeaseTable | None, first_pages: dict[str, int]) -> None:
        self._leases = leases
        self._first_pages = first_pages

    def __enter__(self) -> None:
        if self._leases is not None:
            # Who would end the leases is the caller's own thread: either none is out, or it is too early.
            self._leases.drain_tail(self._first_pages, timeout=0.0)

    def __exit__(self, *_: object) -> None:
        if self._leases is not None:
            self._leases.open_tail()
