"""The prefill side: computes prompts and writes their pages into a decode worker's pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.access import Access
from kvarena.plugin.engines.embedded.codec import Codec
from kvarena.plugin.engines.embedded.connecting import PeerConnection
from kvarena.plugin.engines.embedded.elastic import Elastic
from kvarena.plugin.engines.embedded.link import Spoke
from kvarena.plugin.engines.embedded.peers import (
    PeerLost,
    awake_clock,
    check_peer,
    describe_model,
    ping_interval,
    silence_limit,
)
from kvarena.plugin.engines.embedded.requests import Sequence
from kvarena.plugin.engines.embedded.scheduler import ChunkedPrefill
from kvarena.plugin.engines.embedded.sending import Outbox, PrefillJob
from kvarena.transfer import Lease, TransferFailed

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine

__all__ = ["PrefillServer"]

_RETRY_S: Final = 0.05
_DRAIN_POLL_S: Final = 0.01


class PrefillServer:
    """Serves one decode worker, one prompt after the other; transfers overlap with computing.

    Parameters
    ----------
    engine : Engine
        Finalized, with a transfer engine.
    emit : callable
        Takes the messages for the client.
    access : Access, optional
        How this side shows a decode worker on another host that it may speak.
    """

    def __init__(
        self, engine: Engine, emit: Callable[[control.Message], None], *, access: Access | None = None
    ) -> None:
        self._engine = engine
        self._emit = emit
        self._access = access
        self._timeout = engine.settings.transfer_timeout
        self._clock = awake_clock(self._timeout)
        self.link: Spoke | None = None
        self.refused = ""
        """Why the peer is not served; empty while it is, or none has been connected."""
        self.elastic = Elastic(engine)
        self._connection: PeerConnection | None = None
        self._stale_since: float | None = None
        """Since when the peer's last registration is announced, but could not be connected to."""
        self._retry_at = 0.0
        self._queue: deque[PrefillJob] = deque()
        self._current: tuple[PrefillJob, ChunkedPrefill] | None = None
        self._outbox = Outbox(engine, self._clock, self._timeout)

    @property
    def busy(self) -> bool:
        """Whether the next step has work that is not a message."""
        return bool(self._current or self._queue or self._outbox or self.elastic.busy)

    def connect(self, address: str) -> None:
        """Offer to serve the decode worker at an address; it answers in a later step.

        Raises
        ------
        ControlRefused
            The address is TCP's, and there is no secret.
        """
        self._drop_all()
        if self.link is not None:
            self.link.close()
            self.link = None
        self.refused, self._stale_since = "", None
        engine = self._engine
        codec = Codec(control.TO_DECODE, control.TO_PREFILL)
        join = control.Join(engine.channel.hello(), describe_model(engine.config.model))
        self.link = Spoke(address, access=self._access, codec=codec, clock=self._clock)
        self.link.send(join)

    def step(self) -> None:
        """Take the messages that are there, then move every part of the work a little.

        Raises
        ------
        PeerLost
            The decode worker has closed its connection, or has been silent for too long. Every page
            that nothing reads any more has been released.
        """
        self._resize()
        self._outbox.release_ended()
        if self.link is None:
            return
        for message in self.link.receive():
            self._handle(message)
        if self.refused:
            return
        if self.link.closed_by_peer:
            raise self._lost("it has closed its connection")
        self.link.ping(ping_interval(self._timeout))
        if self.link.silence() > silence_limit(self._timeout):
            hint = "" if self.link.heard else "; it has never answered: is its secret another one?"
            raise self._lost(f"no word from it for {self.link.silence():.1f} s{hint}")
        self._follow_connection()
        if self.refused:
            return
        if self._connection is not None and self._connection.ready and self._stale_since is None:
            self._advance(self._connection.peer)
        if self._connection is not None:
            for job in self._outbox.step(self._clock.now() - self.link.silence(), self._connection):
                self._end(job)
        self._engine.note(resent=self._outbox.resent)

    def stop(self) -> None:
        """Nothing more is to come: tell the decode worker, which would otherwise take it for a failure."""
        if self.link is not None and not self.refused:
            self._drop_all()
            self.link.send(control.Leaving(may_still_write=self._outbox.may_still_read))

    def drain(self) -> None:
        """Wait for transfers that still read this side's pages, one timeout at most: this process ends."""
        end = time.monotonic() + self._timeout
        while self._outbox.may_still_read and time.monotonic() < end:
            self._outbox.release_ended()
            time.sleep(_DRAIN_POLL_S)
        self._outbox.abandon()

    def close(self) -> None:
        """Drop all work and the connection; a second call does nothing."""
        self._drop_all()
        if self.link is not None:
            self.link.close()
            self.link = None

    def _resize(self) -> None:
        if not self.elastic.busy:
            return
        if self.link is None:
            resized = self.elastic.step()
        else:
            # Unregistering can wait for a peer: the decode worker must not take that for our end.
            with self.link.kept_alive(ping_interval(self._timeout)):
                resized = self.elastic.step()
        for message in resized:
            self._emit(message)

    def _handle(self, message: control.Message) -> None:
        if isinstance(message, control.Welcome):
            self._take_welcome(message)
        elif isinstance(message, control.Refused):
            self._refuse(message.what, tell=False)
        elif isinstance(message, control.Leaving):
            self._refuse("it was told to end", tell=False)
        elif isinstance(message, control.Prefill):
            self._take_request(message)
        elif isinstance(message, control.Abort):
            self._abort(message.rid)

    def _take_welcome(self, welcome: control.Welcome) -> None:
        engine = self._engine
        try:
            check_peer(engine.channel, engine.config.model, welcome.pages, welcome.model)
        except KvArenaError as error:
            self._refuse(str(error), tell=True)
            return
        if self._connection is None:
            self._connection = PeerConnection(engine.channel, self._clock, lambda: self._timeout)
        self._connection.renew(welcome.pages)

    def _follow_connection(self) -> None:
        """See what has come of connecting, and try again for as long as the peer lives."""
        connection = self._connection
        if connection is None:
            return
        known = bool(connection.peer)
        outcome = connection.poll()
        if outcome is True:
            self._stale_since = None
            if not known:
                self._emit(control.Connected())
        elif isinstance(outcome, KvArenaError):
            if not known or not isinstance(outcome, TransferFailed):
                self._refuse(str(outcome), tell=True)
                return
            # It is the peer that we serve, and it lives: the connection may come back.
            if self._stale_since is None:
                self._stale_since = self._clock.now()
            if self._clock.now() - self._stale_since > self._timeout:
                self._refuse(str(outcome), tell=True)
                return
            self._retry_at = time.monotonic() + _RETRY_S
        elif self._stale_since is not None and connection.ready and time.monotonic() > self._retry_at:
            connection.renew()

    def _refuse(self, what: str, *, tell: bool) -> None:
        assert self.link is not None
        self._drop_all()
        if tell:
            self.link.send(control.Refused(what, may_still_write=self._outbox.may_still_read))
        self.refused = what
        self._emit(control.Refused(what))

    def _take_request(self, message: control.Prefill) -> None:
        peer = "" if self._connection is None else self._connection.peer
        try:
            lease = Lease.decode(message.lease)
            self._engine.channel.admit(peer, lease)
        except KvArenaError as error:
            self._tell_failure(message.request.rid, str(error))
            return
        if problem := message.request.problem():
            self._tell_failure(message.request.rid, problem)
        else:
            self._queue.append(PrefillJob(Sequence(message.request), lease))

    def _abort(self, rid: int) -> None:
        why = "aborted by the decode worker"
        for job in list(self._queue):
            if job.sequence.rid == rid:
                self._queue.remove(job)
                self._tell_failure(rid, why)
        if self._current and self._current[0].sequence.rid == rid:
            self._fail(self._current[0], why)
            self._current = None
        self._outbox.abort(rid, why)

    def _advance(self, peer: str) -> None:
        """Start the next prompt, or compute the current one's next chunk."""
        if self._current is None and self._queue and not self.elastic.holding:
            job = self._queue[0]
            try:
                admitted = self._engine.book.admit(job.sequence, generates=False)
            except KvArenaError as error:
                self._queue.popleft()
                self._tell_failure(job.sequence.rid, str(error))
                return
            if admitted:
                self._queue.popleft()
                engine = self._engine
                prefill = ChunkedPrefill(engine.config, engine.book, engine.runner, job.sequence)
                self._current = job, prefill
        if self._current is None:
            return
        job, prefill = self._current
        try:
            choice = prefill.step()
        except KvArenaError as error:
            self._current = None
            self._fail(job, str(error))
            return
        if choice is not None:
            self._current = None
            job.choice = choice
            self._outbox.send(peer, job)

    def _end(self, job: PrefillJob) -> None:
        if job.failure:
            self._tell_failure(job.sequence.rid, job.failure, may_still_write=bool(job.pending))
            return
        assert self.link is not None
        assert job.choice is not None
        self.link.send(
            control.PrefillDone(
                rid=job.sequence.rid,
                serial=job.lease.serial,
                written=job.written,
                token=job.choice.token,
                logit=job.choice.logit,
                margin=job.choice.margin,
            )
        )
        pages = " + ".join(f"{count} {name}" for name, count in job.written.items())
        milliseconds = (time.monotonic() - job.submitted_at) * 1e3
        self._emit(
            control.Progress(
                f"request {job.sequence.rid}: {job.sequence.prompt_length} tokens prefilled, "
                f"{pages} pages moved in {milliseconds:.1f} ms",
                moved=True,
            )
        )

    def _fail(self, job: PrefillJob, what: str) -> None:
        """A prompt of which nothing was sent yet."""
        self._engine.book.release(job.sequence)
        self._tell_failure(job.sequence.rid, what)

    def _tell_failure(self, rid: int, what: str, *, may_still_write: bool = False) -> None:
        assert self.link is not None
        self.link.send(control.PrefillFailed(rid, what, may_still_write))
        self._emit(control.Progress(f"request {rid}: {what}"))

    def _lost(self, why: str) -> PeerLost:
        self._drop_all()
        return PeerLost(f"the decode worker is lost: {why}.", fix="Start the pair again.")

    def _drop_all(self) -> None:
        """Let go of every page that nothing reads any more; nobody is told."""
        if self._connection is not None:
            # Ends what is still being read from our pages, before they go to anyone else.
            self._connection.close()
            self._connection = None
        jobs = [*self._queue, *([self._current[0]] if self._current else [])]
        self._queue.clear()
        self._current = None
        for job in jobs:
            self._engine.book.release(job.sequence)
        self._outbox.drop_all()
