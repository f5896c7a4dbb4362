"""The decode side: leases pages, waits for their KV, and decodes with continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.link import Hub
from kvarena.plugin.engines.embedded.peers import (
    PeerLost,
    check_peer,
    describe_model,
    ping_interval,
    silence_limit,
)
from kvarena.plugin.engines.embedded.requests import Request, Result, Sequence
from kvarena.plugin.engines.embedded.scheduler import DecodeBatch
from kvarena.transfer import Lease, LeaseTable

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine

__all__ = ["DecodeServer"]


class DecodeServer:
    """Takes requests from a client and prompts' KV from prefill workers.

    Parameters
    ----------
    engine : Engine
        Finalized, with a transfer engine.
    emit : callable
        Takes the messages for the client.
    host : str
        Where to listen for prefill workers.
    """

    def __init__(
        self, engine: Engine, emit: Callable[[control.Message], None], *, host: str = "127.0.0.1"
    ) -> None:
        self._engine = engine
        self._emit = emit
        self._timeout = engine.settings.transfer_timeout
        self.hub = Hub(host)
        self.batch = DecodeBatch(engine.config, engine.book, engine.runner)
        self.leases = LeaseTable(gate=engine.ledger.gate)
        self._epoch = engine.ledger.epoch
        self._peers: list[bytes] = []
        self._next_peer = 0
        self._waiting: deque[Sequence] = deque()
        self._arriving: dict[int, _Arrival] = {}
        self._lost = ""
        self._quarantine: list[_Arrival] = []

    @property
    def busy(self) -> bool:
        """Whether the next step has work that is not a message."""
        return bool(self.batch)

    def submit(self, request: Request) -> None:
        """Take a request; its answer or error is emitted as `Finished`."""
        sequence = Sequence(request)
        known = {s.rid for s in [*self._waiting, *self.batch.running]} | self._arriving.keys()
        if request.rid in known:
            self._error(sequence, f"request {request.rid} is being served already.")
        elif problem := request.problem():
            self._error(sequence, problem)
        elif self._lost:
            self._error(sequence, self._lost)
        else:
            self._waiting.append(sequence)

    def cancel(self, rid: int) -> None:
        """Drop a request; an unknown one is no error."""
        why = "cancelled by the client."
        for sequence in [s for s in self._waiting if s.rid == rid]:
            self._waiting.remove(sequence)
            self._error(sequence, why)
        for sequence in [s for s in self.batch.running if s.rid == rid]:
            self.batch.drop(sequence)
            self._error(sequence, why)
        if rid in self._arriving:
            # Its pages may be written to right now: they are freed when the prefill worker answers.
            self.hub.send(self._arriving[rid].peer, control.Abort(rid))

    def step(self) -> None:
        """Take the messages that are there, then move every part of the work a little.

        Raises
        ------
        PeerLost
            A prefill worker died or hangs. What it had not delivered has ended in an error, what it
            had is decoded, and every page has been released.
        """
        for peer, message in self.hub.receive():
            self._handle(peer, message)
        self.hub.ping(ping_interval(self._timeout))
        for peer in self._peers:
            if not self._lost and self.hub.silence(peer) > silence_limit(self._timeout):
                self._lose(f"no word from it for {self.hub.silence(peer):.1f} s")
        self._announce()
        if self._lost:
            if not self.batch:
                raise self._leave()
        else:
            self._admit()
        for sequence in self.batch.leave_finished():
            self._emit(control.Finished(sequence.result()))
        for sequence in self.batch.step():
            self._error(sequence, "the pool has no page left for its next token.")

    def close(self) -> None:
        """Drop all work and every connection; a second call does nothing."""
        for sequence in list(self.batch.running):
            self.batch.drop(sequence)
        for arrival in [*self._arriving.values(), *self._quarantine]:
            self._give_up(arrival, "the engine closes")
        self._arriving.clear()
        self._quarantine.clear()
        self._waiting.clear()
        self.hub.close()

    def _handle(self, peer: bytes, message: control.Message) -> None:
        if isinstance(message, control.Hello):
            self._take_hello(peer, message)
        elif isinstance(message, control.Refused):
            self._emit(message)
            self._forget(peer)
        elif peer not in self._peers:
            return
        elif isinstance(message, control.PrefillDone):
            self._take_done(peer, message)
        elif isinstance(message, control.PrefillFailed):
            self._take_failure(peer, message)

    def _take_hello(self, peer: bytes, hello: control.Hello) -> None:
        try:
            check_peer(self._engine, hello.pages, hello.model)
        except KvArenaError as error:
            # Both go on: the other may be a worker of another server, and others may come to us.
            self.hub.send(peer, control.Refused(str(error)))
            self.hub.forget(peer)
            self._emit(control.Refused(str(error)))
            return
        self._welcome(peer)
        if peer not in self._peers:
            self._peers.append(peer)

    def _welcome(self, peer: bytes) -> None:
        engine = self._engine
        self.hub.send(peer, control.Welcome(engine.channel.hello(), describe_model(engine.config.model)))

    def _announce(self) -> None:
        """Tell the peers of a new registration; leases of before stay good, for pages do not move."""
        if self._engine.ledger.epoch != self._epoch:
            self._epoch = self._engine.ledger.epoch
            for peer in self._peers:
                self._welcome(peer)

    def _forget(self, peer: bytes) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
        self.hub.forget(peer)

    def _admit(self) -> None:
        """Lease pages to waiting requests, first come first served."""
        book, config = self._engine.book, self._engine.config
        while self._peers and self._waiting:
            if len(self.batch) + len(self._arriving) >= config.max_running:
                return
            sequence = self._waiting[0]
            try:
                admitted = book.admit(sequence, generates=True)
            except KvArenaError as error:
                self._waiting.popleft()
                self._error(sequence, str(error))
                continue
            if not admitted:
                return
            if not book.hold(sequence):
                book.release(sequence)
                return
            self._waiting.popleft()
            self._lease(sequence)

    def _lease(self, sequence: Sequence) -> None:
        book = self._engine.book
        book.pin(sequence)
        pages = book.physical_pages(sequence)
        lease = self.leases.grant(str(sequence.rid), pages, epoch=self._engine.ledger.epoch)
        peer = self._peers[self._next_peer % len(self._peers)]
        self._next_peer += 1
        arrival = _Arrival(sequence, lease, peer)
        self._arriving[sequence.rid] = arrival
        if not self.hub.send(peer, control.Prefill(sequence.request, lease.encode())):
            self._lose("it has closed its connection")

    def _take_done(self, peer: bytes, done: control.PrefillDone) -> None:
        arrival = self._arriving.get(done.rid)
        if arrival is None or arrival.peer != peer or arrival.lease.serial != done.serial:
            return
        sequence = arrival.sequence
        del self._arriving[done.rid]
        leased = {name: len(pages) for name, pages in arrival.lease.pages.items()}
        if done.written != leased:
            self._give_up(arrival, "incomplete")
            self._error(sequence, f"pages written are {done.written}, leased were {leased}.")
            return
        self.leases.complete(str(done.rid), done.serial)
        self._engine.book.unpin(sequence)
        sequence.append(done.token, done.logit, done.margin)
        self.batch.join(sequence)

    def _take_failure(self, peer: bytes, failed: control.PrefillFailed) -> None:
        arrival = self._arriving.get(failed.rid)
        if arrival is None or arrival.peer != peer:
            return
        if not failed.settled:
            # Something may still write into the leased pages: they must not go to anyone else.
            self._lose(failed.what)
            return
        del self._arriving[failed.rid]
        self._give_up(arrival, failed.what)
        self._error(arrival.sequence, f"prefill failed: {failed.what}")

    def _give_up(self, arrival: _Arrival, why: str) -> None:
        self.leases.revoke(str(arrival.sequence.rid), why)
        self._engine.book.release(arrival.sequence)

    def _error(self, sequence: Sequence, what: str) -> None:
        self._emit(control.Finished(Result(sequence.rid, sequence.generated, "error", error=what)))

    def _lose(self, why: str) -> None:
        """A prefill worker is gone: nothing new begins, what has arrived is decoded to its end."""
        self._lost = f"a prefill worker is lost: {why}."
        # A worker that only hangs could still write, so these pages rest until this process ends its work.
        self._quarantine += self._arriving.values()
        unserved = [*(arrival.sequence for arrival in self._arriving.values()), *self._waiting]
        self._arriving.clear()
        self._waiting.clear()
        for sequence in unserved:
            self._error(sequence, self._lost)

    def _leave(self) -> PeerLost:
        for arrival in self._quarantine:
            self._give_up(arrival, self._lost)
        self._quarantine.clear()
        return PeerLost(self._lost, fix="Start the pair again.")


class _Arrival(msgspec.Struct, frozen=True, eq=False):
    """A request whose KV is being computed or written by a peer."""

    sequence: Sequence
    lease: Lease
    peer: bytes
