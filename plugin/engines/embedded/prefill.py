"""The prefill side: computes prompts and writes their pages into a decode worker's pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.elastic import Elastic
from kvarena.plugin.engines.embedded.link import Spoke
from kvarena.plugin.engines.embedded.peers import (
    PeerLost,
    check_peer,
    describe_model,
    ping_interval,
    silence_limit,
)
from kvarena.plugin.engines.embedded.requests import Sequence
from kvarena.plugin.engines.embedded.scheduler import ChunkedPrefill
from kvarena.plugin.engines.embedded.sending import Job, Outbox
from kvarena.transfer import Lease, TransferFailed

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine

__all__ = ["PrefillServer"]


class PrefillServer:
    """Serves one decode worker, one prompt after the other; transfers overlap with computing.

    Parameters
    ----------
    engine : Engine
        Finalized, with a transfer engine.
    emit : callable
        Takes the messages for the client.
    """

    def __init__(self, engine: Engine, emit: Callable[[control.Message], None]) -> None:
        self._engine = engine
        self._emit = emit
        self._timeout = engine.settings.transfer_timeout
        self.link: Spoke | None = None
        self.refused = ""
        """Why the peer is not served; empty while it is, or none has been connected."""
        self.elastic = Elastic(engine)
        self._peer = ""
        self._welcome = b""
        self._stale_since: float | None = None
        """Since when the peer's last registration is announced, but could not be taken over."""
        self._queue: deque[Job] = deque()
        self._current: tuple[Job, ChunkedPrefill] | None = None
        self._outbox = Outbox(engine, self._timeout)

    @property
    def busy(self) -> bool:
        """Whether the next step has work that is not a message."""
        return bool(self._current or self._queue or self._outbox or self.elastic.busy)

    def connect(self, address: str) -> None:
        """Offer to serve the decode worker at an address; it answers in a later step."""
        if self.link is not None:
            self.link.close()
        self.refused = ""
        self.link = Spoke(address)
        engine = self._engine
        self.link.send(control.Hello(engine.channel.hello(), describe_model(engine.config.model)))

    def step(self) -> None:
        """Take the messages that are there, then move every part of the work a little.

        Raises
        ------
        PeerLost
            The decode worker has been silent for too long. Every page has been released.
        """
        for resized in self.elastic.step():
            self._emit(resized)
        if self.link is None:
            return
        for message in self.link.receive():
            self._handle(message)
        if self.refused:
            return
        self.link.ping(ping_interval(self._timeout))
        if self.link.silence() > silence_limit(self._timeout):
            raise self._lost(f"no word from it for {self.link.silence():.1f} s")
        self._catch_up()
        if self.refused:
            return
        if self._stale_since is None:
            self._advance()
        for job in self._outbox.step(time.monotonic() - self.link.silence(), self._reconnect):
            self._end(job)
        self._engine.note(resent=self._outbox.resent)

    def close(self) -> None:
        """Drop all work and the connection; a second call does nothing."""
        self._drop_all()
        if self.link is not None:
            self.link.close()
            self.link = None

    def _handle(self, message: control.Message) -> None:
        if isinstance(message, control.Welcome):
            self._take_welcome(message)
        elif isinstance(message, control.Refused):
            self._refuse(message.what, tell=False)
        elif isinstance(message, control.Prefill):
            self._take_request(message)
        elif isinstance(message, control.Abort):
            self._abort(message.rid)

    def _take_welcome(self, welcome: control.Welcome) -> None:
        known = self._peer
        try:
            check_peer(self._engine, welcome.pages, welcome.model)
            self._welcome = welcome.pages
            self._reconnect()
        except KvArenaError as error:
            if known and isinstance(error, TransferFailed):
                # It is the peer that we serve, and it lives: the connection may come back.
                self._stale_since = self._stale_since or time.monotonic()
            else:
                self._refuse(str(error), tell=True)
            return
        self._stale_since = None
        if not known:
            self._emit(control.Connected())

    def _catch_up(self) -> None:
        """Take a registration over that could not be when it was announced."""
        if self._stale_since is None:
            return
        try:
            self._reconnect()
        except KvArenaError as error:
            if time.monotonic() - self._stale_since > self._timeout:
                self._refuse(str(error), tell=True)
            return
        self._stale_since = None

    def _reconnect(self) -> str:
        """After a lost connection an engine may have forgotten the peer."""
        self._peer = self._engine.channel.connect(self._welcome)
        return self._peer

    def _refuse(self, what: str, *, tell: bool) -> None:
        assert self.link is not None
        if tell:
            self.link.send(control.Refused(what))
        self.refused = what
        self._drop_all()
        self._emit(control.Refused(what))

    def _take_request(self, message: control.Prefill) -> None:
        try:
            lease = Lease.decode(message.lease)
            self._engine.channel.admit(self._peer, lease)
        except KvArenaError as error:
            self._tell_failure(message.request.rid, str(error))
            return
        if problem := message.request.problem():
            self._tell_failure(message.request.rid, problem)
        else:
            self._queue.append(Job(Sequence(message.request), lease))

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

    def _advance(self) -> None:
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
            self._outbox.send(self._peer, job)

    def _end(self, job: Job) -> None:
        if job.failure:
            self._fail(job, job.failure, settled=job.settled)
            return
        self._engine.book.release(job.sequence)
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
        milliseconds = (time.monotonic() - job.began) * 1e3
        self._emit(
            control.Progress(
                f"request {job.sequence.rid}: {job.sequence.prompt_length} tokens prefilled, "
                f"{pages} pages moved in {milliseconds:.1f} ms",
                moved=True,
            )
        )

    def _fail(self, job: Job, what: str, *, settled: bool = True) -> None:
        self._engine.book.release(job.sequence)
        self._tell_failure(job.sequence.rid, what, settled=settled)

    def _tell_failure(self, rid: int, what: str, *, settled: bool = True) -> None:
        assert self.link is not None
        self.link.send(control.PrefillFailed(rid, what, settled))
        self._emit(control.Progress(f"request {rid}: {what}"))

    def _lost(self, why: str) -> PeerLost:
        self._drop_all()
        return PeerLost(f"the decode worker is lost: {why}.", fix="Start the pair again.")

    def _drop_all(self) -> None:
        """Let go of every page; nobody is told."""
        if self._peer:
            # Ends what is still being read from our pages, before they go to anyone else.
            self._engine.channel.disconnect(self._peer)
            self._peer = ""
        jobs = [*self._queue, *([self._current[0]] if self._current else []), *self._outbox.drop_all()]
        self._queue.clear()
        self._current = None
        for job in jobs:
            self._engine.book.release(job.sequence)
