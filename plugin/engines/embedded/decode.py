"""The decode side: leases pages, waits for their KV, and decodes with continuous batching."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.access import Access, control_endpoint
from kvarena.plugin.engines.embedded.arrivals import Arrival, Arrivals
from kvarena.plugin.engines.embedded.codec import Codec
from kvarena.plugin.engines.embedded.elastic import Elastic
from kvarena.plugin.engines.embedded.link import Hub
from kvarena.plugin.engines.embedded.peers import (
    PeerLost,
    awake_clock,
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

logger = logging.getLogger(__name__)

# An abort is answered at once, or when the transfer has ended, which takes one timeout at most.
_ABORT_TIMEOUTS = 2


class DecodeServer:
    """Takes requests from a client and prompts' KV from prefill workers.

    A prefill worker that dies, hangs or breaks the rules costs its own requests. Once the last one is lost,
    the server ends: what has arrived is decoded first.

    Parameters
    ----------
    engine : Engine
        Finalized, with a transfer engine.
    emit : callable
        Takes the messages for the client.
    endpoint : str, optional
        Where to listen for prefill workers; by default as the engine's settings say.
    access : Access, optional
        How prefill workers on other hosts are known.

    Raises
    ------
    AddressInUse, ControlRefused, DescriptorLimitError
        Nothing is left open.
    """

    def __init__(
        self,
        engine: Engine,
        emit: Callable[[control.Message], None],
        *,
        endpoint: str | None = None,
        access: Access | None = None,
    ) -> None:
        self._engine = engine
        self._emit = emit
        self._timeout = engine.settings.transfer_timeout
        self._clock = awake_clock(self._timeout)
        with ExitStack() as undo:
            self.hub = Hub(
                endpoint or control_endpoint(engine.settings),
                access=access,
                codec=Codec(control.TO_PREFILL, control.TO_DECODE),
                clock=self._clock,
            )
            undo.callback(self.hub.close)
            self.batch = DecodeBatch(engine.config, engine.book, engine.runner)
            self._arrivals = Arrivals(engine, self._clock, self._timeout)
            self.leases = self._arrivals.leases
            self.elastic = Elastic(engine, self.leases)
            undo.pop_all()
        self._epoch = engine.ledger.epoch
        self._peers: list[bytes] = []
        self._next_peer = 0
        self._waiting: deque[Sequence] = deque()
        self._lost = ""

    @property
    def busy(self) -> bool:
        """Whether the next step has work that is not a message."""
        return bool(self.batch or self._arrivals.busy or self.elastic.busy)

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
        """Drop a request; an unknown one is ignored."""
        why = "cancelled by the client."
        for sequence in [s for s in self._waiting if s.rid == rid]:
            self._waiting.remove(sequence)
            self._error(sequence, why)
        for sequence in [s for s in self.batch.running if s.rid == rid]:
            self.batch.drop(sequence)
            self._error(sequence, why)
        arrival = self._arrivals.find(rid)
        if arrival is not None and not arrival.cancelled:
            # Its pages may be written to right now: they are freed when the prefill worker answers. Whatever
            # it answers, or has answered already, the client has been told.
            arrival.cancelled, arrival.cancelled_at = True, self._clock.now()
            self._error(arrival.sequence, why)
            self.hub.send(arrival.peer, control.Abort(rid))

    def step(self) -> None:
        """Take the messages that are there, then move every part of the work a little.

        Raises
        ------
        PeerLost
            A prefill worker died or hangs. What it had not delivered has ended in an error, what it
            had is decoded, and every page has been released.
        """
        # Found closed before these messages were read: nothing more is to come from them.
        closed = self.hub.take_closed()
        for peer, message in self.hub.receive():
            self._handle(peer, message)
        # Whoever else has said something would be pinged for ever.
        for stranger in self.hub.last_heard.keys() - set(self._peers):
            self.hub.forget(stranger)
        self._look_for_lost_peers(closed)
        self.hub.ping(ping_interval(self._timeout))
        self._resize()
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
        """Nothing more is to come: tell the prefill workers, which would otherwise take it for a failure.

        Raises
        ------
        PeerLost
            The last prefill worker was lost, and no step has said so yet.
        """
        if self._lost:
            raise self._leave()
        for peer in self._peers:
            self.hub.send(peer, control.Leaving())

    def close(self) -> None:
        """Drop all work and every connection; a second call does nothing."""
        for sequence in list(self.batch.running):
            self.batch.drop(sequence)
        self._arrivals.end("the engine closes")
        self._waiting.clear()
        self.hub.close()

    def _handle(self, peer: bytes, message: control.Message) -> None:
        if isinstance(message, control.Join):
            self._take_join(peer, message)
        elif peer not in self._peers:
            return
        elif isinstance(message, control.Refused):
            self._part(peer, message)
        elif isinstance(message, control.Leaving):
            self._drop_peer(peer, "it was told to end", may_still_write=message.may_still_write)
        elif isinstance(message, control.PrefillDone):
            self._take_done(peer, message)
        elif isinstance(message, control.PrefillFailed):
            self._take_failure(peer, message)

    def _take_join(self, peer: bytes, join: control.Join) -> None:
        engine = self._engine
        try:
            check_peer(engine.channel, engine.config.model, join.pages, join.model)
        except KvArenaError as error:
            # Both go on: the other may be a worker of another server, and others may come to us.
            told = str(error) if self.hub.keeps_strangers_out else "the decode worker's client is told why"
            self.hub.send(peer, control.Refused(told))
            self._part(peer, control.Refused(str(error)))
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

    def _resize(self) -> None:
        if not self.elastic.busy:
            return
        # Unregistering can wait for a sender that has stopped: the others must not take that for our end.
        with self.hub.kept_alive(ping_interval(self._timeout)):
            resized = self.elastic.step()
        for message in resized:
            self._emit(message)

    def _part(self, peer: bytes, refused: control.Refused) -> None:
        """One of us has refused the other, be it after some time."""
        self._emit(refused)
        self._drop_peer(peer, refused.what, may_still_write=refused.may_still_write)

    def _drop_peer(self, peer: bytes, why: str, *, may_still_write: bool) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
        self.hub.forget(peer)
        what = f"the prefill worker serves no longer: {why}"
        for arrival in self._arrivals.give_up_all(peer, what, may_still_write=may_still_write):
            self._answer(arrival, what)

    def _look_for_lost_peers(self, closed: set[bytes]) -> None:
        for peer in list(self._peers):
            if peer in closed:
                self._lose(peer, "it has closed its connection")
            elif self.hub.silence(peer) > silence_limit(self._timeout):
                self._lose(peer, f"no word from it for {self.hub.silence(peer):.1f} s")
            elif self._arrivals.longest_abort(peer) > _ABORT_TIMEOUTS * self._timeout:
                self._lose(
                    peer, f"it has not answered an abort for {self._arrivals.longest_abort(peer):.1f} s"
                )

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
            # It has never seen this lease: another worker may serve the request, once its pages are free.
            self._arrivals.give_up(arrival, "it could not be sent")
            if sequence.rid in self._arrivals:
                self._error(sequence, "the prefill worker that should serve it is lost.")
            else:
                self._waiting.appendleft(Sequence(sequence.request))
            self._lose(peer, "it has closed its connection")

    def _take_done(self, peer: bytes, done: control.PrefillDone) -> None:
        arrival = self._arrivals.find(done.rid, peer)
        if arrival is not None and arrival.lease.serial == done.serial:
            self._arrivals.record_done(arrival, done)

    def _join_arrived(self) -> None:
        for arrival in self._arrivals.collect():
            if arrival.failure or arrival.cancelled:
                self._answer(arrival, arrival.failure)
                continue
            assert arrival.done is not None
            arrival.sequence.append(arrival.done.token, arrival.done.logit, arrival.done.margin)
            self.batch.join(arrival.sequence)

    def _take_failure(self, peer: bytes, failed: control.PrefillFailed) -> None:
        arrival = self._arrivals.find(failed.rid, peer)
        if arrival is None:
            return
        if failed.may_still_write:
            # Something may still write into the leased pages: they must not go to anyone else.
            self._lose(peer, failed.what)
            return
        self._arrivals.give_up(arrival, failed.what)
        self._answer(arrival, f"prefill failed: {failed.what}")

    def _answer(self, arrival: Arrival, what: str) -> None:
        """An error for a request that was with a prefill worker, unless its client was answered before."""
        if not arrival.cancelled:
            self._error(arrival.sequence, what)

    def _error(self, sequence: Sequence, what: str) -> None:
        self._emit(control.Finished(Result(sequence.rid, sequence.generated, "error", error=what)))

    def _lose(self, peer: bytes, why: str) -> None:
        """A prefill worker is gone, and with it its requests; after the last one nothing new begins."""
        what = f"a prefill worker is lost: {why}."
        logger.warning("%s", what)
        self._emit(control.Progress(what))
        self._peers.remove(peer)
        self.hub.forget(peer)
        # A worker that only hangs could still write.
        for arrival in self._arrivals.give_up_all(peer, what, may_still_write=True):
            self._answer(arrival, what)
        if self._peers:
            return
        self._lost = what
        for sequence in self._waiting:
            self._error(sequence, what)
        self._waiting.clear()

    def _leave(self) -> PeerLost:
        self._arrivals.end(self._lost)
        return PeerLost(self._lost, fix="Start the pair again.")
