"""Requests whose KV a prefill worker computes and writes: their pages, their leases, their end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.config import VOCABULARY
from kvarena.plugin.engines.embedded.control import PrefillDone
from kvarena.plugin.engines.embedded.requests import Sequence
from kvarena.transfer import Lease, LeaseTable

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine
    from kvarena.transfer import Pending

__all__ = ["Arrival", "Arrivals"]


class Arrival(msgspec.Struct, eq=False):
    """A request whose KV is being computed or written by a peer."""

    sequence: Sequence
    lease: Lease
    peer: bytes
    incoming: Pending | None
    """Ends when the pages are there, where the transfer engine tells a receiver."""
    done: PrefillDone | None = None
    """What the peer said when it had written everything."""
    done_at: float = 0.0
    failure: str = ""


class Arrivals:
    """Leases pages to requests, and takes them back when they have arrived, or will not.

    Parameters
    ----------
    engine : Engine
    timeout : float
        Seconds that the transfer engine may take to confirm what a peer says that it has written.
    """

    def __init__(self, engine: Engine, timeout: float) -> None:
        self._engine = engine
        self._timeout = timeout
        self._expected: dict[int, Arrival] = {}
        self._quarantine: list[Arrival] = []
        self.leases = LeaseTable(gate=engine.ledger.gate)

    def __len__(self) -> int:
        return len(self._expected)

    def __contains__(self, rid: int) -> bool:
        return rid in self._expected

    @property
    def confirming(self) -> bool:
        """Whether something was said to be written that the transfer engine has not confirmed yet."""
        return any(arrival.done is not None for arrival in self._expected.values())

    def find(self, rid: int, peer: bytes | None = None) -> Arrival | None:
        """A request that is expected, from that peer if one is named."""
        arrival = self._expected.get(rid)
        return arrival if arrival is None or peer in (None, arrival.peer) else None

    def lease(self, sequence: Sequence, peer: bytes) -> Arrival:
        """Pin the pages that a sequence holds, and let a peer write them."""
        engine = self._engine
        engine.book.pin(sequence)
        pages = engine.book.physical_pages(sequence)
        lease = self.leases.grant(str(sequence.rid), pages, epoch=engine.ledger.epoch)
        # Asked before the lease goes out: the pages could be there before the next line.
        arrival = Arrival(sequence, lease, peer, engine.channel.expect(lease))
        self._expected[sequence.rid] = arrival
        return arrival

    def say_done(self, arrival: Arrival, done: PrefillDone) -> None:
        """A peer says that every page is written; `settle` finds out whether that is so."""
        arrival.done, arrival.done_at = done, time.monotonic()
        leased = {name: len(pages) for name, pages in arrival.lease.pages.items()}
        if done.written != leased:
            arrival.failure = f"pages written are {done.written}, leased were {leased}."
        elif not 0 <= done.token < VOCABULARY:
            arrival.failure = f"its first token is {done.token}, there are {VOCABULARY}."

    def settle(self) -> list[Arrival]:
        """Take out what has arrived: usable, or with a `failure` and its pages taken back."""
        ended = [arrival for arrival in self._expected.values() if self._has_ended(arrival)]
        for arrival in ended:
            del self._expected[arrival.sequence.rid]
            if arrival.failure:
                self._take_back(arrival, arrival.failure)
            else:
                self.leases.complete(arrival.lease.request, arrival.lease.serial)
                self._engine.book.unpin(arrival.sequence)
        return ended

    def give_up(self, arrival: Arrival, why: str) -> None:
        """It will not come, and nothing writes to its pages any more."""
        del self._expected[arrival.sequence.rid]
        self._take_back(arrival, why)

    def rest(self, peer: bytes | None = None) -> list[Arrival]:
        """What is expected of a peer (None: of any) is given up, its pages stay with nobody.

        For a peer that might still write: these pages must not go to anyone else.
        """
        lost = [arrival for arrival in self._expected.values() if peer in (None, arrival.peer)]
        self._quarantine += lost
        for arrival in lost:
            del self._expected[arrival.sequence.rid]
        return lost

    def end(self, why: str) -> None:
        """Free everything: this process does not serve any more."""
        for arrival in [*self._expected.values(), *self._quarantine]:
            self._take_back(arrival, why)
        self._expected.clear()
        self._quarantine.clear()

    def _has_ended(self, arrival: Arrival) -> bool:
        if arrival.done is None:
            return False
        if arrival.failure or arrival.incoming is None:
            return True
        try:
            if arrival.incoming.done():
                return True
        except KvArenaError as error:
            arrival.failure = str(error)
            return True
        if time.monotonic() - arrival.done_at > self._timeout:
            arrival.failure = f"its pages were said to be written, but were not after {self._timeout:g} s."
        return bool(arrival.failure)

    def _take_back(self, arrival: Arrival, why: str) -> None:
        self._engine.channel.take_back(arrival.lease, why)
        self.leases.revoke(arrival.lease.request, why)
        self._engine.book.release(arrival.sequence)
