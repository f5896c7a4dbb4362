"""Requests whose KV a prefill worker computes and writes: their pages, their leases, their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.config import VOCABULARY
from kvarena.plugin.engines.embedded.control import PrefillDone
from kvarena.plugin.engines.embedded.reclaiming import Reclaimer, Reclamation
from kvarena.plugin.engines.embedded.requests import Sequence
from kvarena.transfer import Lease, LeaseTable

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.clock import AwakeClock
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
    cancelled: bool = False
    """Whether its client has been answered: whatever arrives is not decoded."""
    cancelled_at: float = 0.0


class Arrivals:
    """Leases pages to requests, and takes them back when they have arrived, or will not.

    Pages that a peer may still write are in quarantine: they belong to nobody until the transfer engine
    has proven that nobody writes them. That is asked on a thread of its own, for it can take long.

    Parameters
    ----------
    engine : Engine
    clock : AwakeClock
    timeout : float
        Seconds that the transfer engine may take to confirm what a peer says that it has written.
    """

    def __init__(self, engine: Engine, clock: AwakeClock, timeout: float) -> None:
        self._engine = engine
        self._clock = clock
        self._timeout = timeout
        self._expected: dict[int, Arrival] = {}
        self._quarantine: list[Arrival] = []
        self._reclaimed: list[tuple[Arrival, Reclamation]] = []
        self._reclaimer = Reclaimer(engine.channel)
        self.leases = LeaseTable(gate=engine.ledger.gate, on_complete=engine.channel.count_received)

    def __len__(self) -> int:
        return len(self._expected)

    def __contains__(self, rid: int) -> bool:
        """Whether a request's pages are not free yet."""
        quarantined = [*self._quarantine, *(arrival for arrival, _ in self._reclaimed)]
        return rid in self._expected or any(arrival.sequence.rid == rid for arrival in quarantined)

    @property
    def busy(self) -> bool:
        """Whether something was said to be written that the transfer engine has not confirmed yet."""
        return any(arrival.done is not None for arrival in self._expected.values())

    def find(self, rid: int, peer: bytes | None = None) -> Arrival | None:
        """A request that is expected, from that peer if one is named."""
        arrival = self._expected.get(rid)
        return arrival if arrival is None or peer in (None, arrival.peer) else None

    def longest_abort(self, peer: bytes) -> float:
        """Seconds for which a peer has left the cancellation of a request unanswered; 0: there is none."""
        since = [
            each.cancelled_at for each in self._expected.values() if each.cancelled and each.peer == peer
        ]
        return self._clock.now() - min(since) if since else 0.0

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

    def record_done(self, arrival: Arrival, done: PrefillDone) -> None:
        """A peer says that every page is written; `collect` finds out whether that is so."""
        arrival.done, arrival.done_at = done, self._clock.now()
        leased = {name: len(pages) for name, pages in arrival.lease.pages.items()}
        if done.written != leased:
            arrival.failure = f"pages written are {done.written}, leased were {leased}."
        elif not 0 <= done.token < VOCABULARY:
            arrival.failure = f"its first token is {done.token}, there are {VOCABULARY}."

    def collect(self) -> list[Arrival]:
        """Take out what has arrived: usable, or with a `failure`, or cancelled; free what nobody writes."""
        self._free_reclaimed()
        ended = [arrival for arrival in self._expected.values() if self._has_ended(arrival)]
        for arrival in ended:
            del self._expected[arrival.sequence.rid]
            if arrival.failure:
                self._take_back(arrival, arrival.failure)
                continue
            self.leases.complete(arrival.lease.request, arrival.lease.serial)
            if arrival.cancelled:
                self._engine.book.release(arrival.sequence)
            else:
                self._engine.book.unpin(arrival.sequence)
        return ended

    def give_up(self, arrival: Arrival, why: str) -> None:
        """It will not come, and its sender says that it writes nothing any more."""
        del self._expected[arrival.sequence.rid]
        self._take_back(arrival, why)

    def give_up_all(self, peer: bytes | None, why: str, *, may_still_write: bool) -> list[Arrival]:
        """What is expected of a peer (None: of any) will not come; returns it.

        Parameters
        ----------
        may_still_write : bool
            Whether the peer can still write into these pages. Where the transfer engine cannot prove that it
            does not, they stay in quarantine until `end`.
        """
        lost = [arrival for arrival in self._expected.values() if peer in (None, arrival.peer)]
        for arrival in lost:
            del self._expected[arrival.sequence.rid]
            if may_still_write and self._engine.channel.leased is None:
                self._quarantine.append(arrival)
            else:
                self._take_back(arrival, why)
        return lost

    def end(self, why: str) -> None:
        """Free everything: this process serves no longer, so nobody else gets these pages."""
        for arrival in [*self._expected.values(), *self._quarantine]:
            self._take_back(arrival, why)
        self._expected.clear()
        self._quarantine.clear()
        self._reclaimer.close(self._timeout)
        for _, reclamation in self._reclaimed:
            reclamation.proven = True
        self._free_reclaimed()

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
        if self._clock.now() - arrival.done_at > self._timeout:
            arrival.failure = f"its pages were said to be written, but were not after {self._timeout:g} s."
        return bool(arrival.failure)

    def _take_back(self, arrival: Arrival, why: str) -> None:
        self._reclaimed.append((arrival, self._reclaimer.take_back(arrival.lease, why)))
        self._free_reclaimed()

    def _free_reclaimed(self) -> None:
        waiting = []
        for arrival, reclamation in self._reclaimed:
            if reclamation.proven:
                self.leases.revoke(arrival.lease.request, reclamation.why)
                self._engine.book.release(arrival.sequence)
            else:
                waiting.append((arrival, reclamation))
        self._reclaimed = waiting
