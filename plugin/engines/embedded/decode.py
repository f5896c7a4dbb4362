"""The decode side: leases pages, waits for their KV, and decodes with continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.arrivals import Arrivals
from kvarena.plugin.engines.embedded.elastic import Elastic
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
        self._arrivals = Arrivals(engine, self._timeout)
        self.leases = self._arrivals.leases
        self.elastic = Elastic(engine, self.leases)
        self._epoch = engine.ledger.epoch
        self._peers: list[bytes] = []
        self._next_peer = 0
        self._waiting: deque[Sequence] = deque()
        self._lost = ""

    @property
    def busy(self) -> bool:
        """Whether the next step has work that is not a message."""
        return bool(self.batch or self._arrivals.confirming or self.elastic.busy)

    def submit(self, request: Request) -> None:
        """Take a request; its answer or error is emitted as `Finished`."""
        sequence = Sequence(request)
        known = {s.rid for s in [*self._waiting, *self.batch.running]}
        if request.rid in known or request.rid in self._arrivals:
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
        if arrival := self._arrivals.find(rid):
            # Its pages may be written to right now: they are freed when the prefill worker answers.
            self.hub.send(arrival.peer, control.Abort(rid))

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
        # Whoever else has said something would be pinged for ever.
        for stranger in self.hub.last_heard.keys() - set(self._peers):
            self.hub.forget(stranger)
        self.hub.ping(ping_interval(self._timeout))
        for peer in self._peers:
            if not self._lost and self.hub.silence(peer) > silence_limit(self._timeout):
                self._lose(f"no word from it for {self.hub.silence(peer):.1f} s")
        for resized in self.elastic.step():
            self._emit(resized)
        # Before anything is leased: a lease of a new registration is of no use to who knows the old one.
        self._announce()
        self._join_arrived()
        if self._lost:
            if not self.batch:
                raise self._leave()
        elif not self.elastic.holding:
            self._admit()
        for sequence in self.batch.leave_finished():
            self._emit(control.Finished(sequence.result()))
        for sequence in self.batch.step():
            self._error(sequence, "the pool has no page left for its next token.")

    def stop(self) -> None:
        """Nothing more is to come.

        Raises
        ------
        PeerLost
            A prefill worker was lost, and no step has said so yet.
        """
        if self._lost:
            raise self._leave()

    def close(self) -> None:
        """Drop all work and every connection; a second call does nothing."""
        for sequence in list(self.batch.running):
            self.batch.drop(sequence)
        self._arrivals.end("the engine closes")
        self._waiting.clear()
        self.hub.close()

    def _handle(self, peer: bytes, message: control.Message) -> None:
        if isinstance(message, control.Hello):
            self._take_hello(peer, message)
        elif peer not in self._peers:
            return
        elif isinstance(message, control.Refused):
            self._part(peer, message)
        elif isinstance(message, control.PrefillDone):
            self._take_done(peer, message)
        elif isinstance(message, control.PrefillFailed):
            self._take_failure(peer, message)

    def _take_hello(self, peer: bytes, hello: control.Hello) -> None:
        try:
            check_peer(self._engine, hello.pages, hello.model)
        except KvArenaError as error:
            # Both go on: the other may be a worker of another server, and others may come to us.
            refused = control.Refused(str(error))
            self.hub.send(peer, refused)
            self._part(peer, refused)
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

    def _part(self, peer: bytes, refused: control.Refused) -> None:
        """One of us has refused the other, be it after some time."""
        self._emit(refused)
        if peer in self._peers:
            self._peers.remove(peer)
        for arrival in self._arrivals.rest(peer):
            self._error(arrival.sequence, f"the prefill worker serves no longer: {refused.what}")

    def _admit(self) -> None:
        """Lease pages to waiting requests, first come first served."""
        book, config = self._engine.book, self._engine.config
        while self._peers and self._waiting:
            if len(self.batch) + len(self._arrivals) >= config.max_running:
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
        peer = self._peers[self._next_peer % len(self._peers)]
        self._next_peer += 1
        arrival = self._arrivals.lease(sequence, peer)
        if not self.hub.send(peer, control.Prefill(sequence.request, arrival.lease.encode())):
            self._lose("it has closed its connection")

    def _take_done(self, peer: bytes, done: control.PrefillDone) -> None:
        arrival = self._arrivals.find(done.rid, peer)
        if arrival is not None and arrival.lease.serial == done.serial:
            self._arrivals.say_done(arrival, done)

    def _join_arrived(self) -> None:
        for arrival in self._arrivals.settle():
            if arrival.failure:
                self._error(arrival.sequence, arrival.failure)
                continue
            assert arrival.done is not None
            arrival.sequence.append(arrival.done.token, arrival.done.logit, arrival.done.margin)
            self.batch.join(arrival.sequence)

    def _take_failure(self, peer: bytes, failed: control.PrefillFailed) -> None:
        arrival = self._arrivals.find(failed.rid, peer)
        if arrival is None:
            return
        if not failed.settled:
            # Something may still write into the leased pages: they must not go to anyone else.
            self._lose(failed.what)
            return
        self._arrivals.give_up(arrival, failed.what)
        self._error(arrival.sequence, f"prefill failed: {failed.what}")

    def _error(self, sequence: Sequence, what: str) -> None:
        self._emit(control.Finished(Result(sequence.rid, sequence.generated, "error", error=what)))

    def _lose(self, why: str) -> None:
        """A prefill worker is gone: nothing new begins, what has arrived is decoded to its end."""
        self._lost = f"a prefill worker is lost: {why}."
        # A worker that only hangs could still write, so these pages rest until this process ends its work.
        unserved = [*(arrival.sequence for arrival in self._arrivals.rest()), *self._waiting]
        self._waiting.clear()
        for sequence in unserved:
            self._error(sequence, self._lost)

    def _leave(self) -> PeerLost:
        self._arrivals.end(self._lost)
        return PeerLost(self._lost, fix="Start the pair again.")
