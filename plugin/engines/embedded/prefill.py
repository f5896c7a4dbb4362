"""The prefill side: computes prompts and writes their pages into a decode worker's pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded import control
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
from kvarena.transfer import Lease, PageError, PageMoves

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine
    from kvarena.plugin.engines.embedded.runner import Choice
    from kvarena.transfer import Pending

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
        self._peer = ""
        self._queue: deque[_Job] = deque()
        self._current: tuple[_Job, ChunkedPrefill] | None = None
        self._sending: list[_Job] = []

    @property
    def busy(self) -> bool:
        """Whether the next step has work that is not a message."""
        return bool(self._current or self._queue or self._sending)

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
        if self.link is None:
            return
        for message in self.link.receive():
            self._handle(message)
        if self.refused:
            return
        self.link.ping(ping_interval(self._timeout))
        if self.link.silence() > silence_limit(self._timeout):
            raise self._lost(f"no word from it for {self.link.silence():.1f} s")
        self._advance()
        for job in list(self._sending):
            self._poll(job)

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
        try:
            check_peer(self._engine, welcome.pages, welcome.model)
            known, self._peer = self._peer, self._engine.channel.connect(welcome.pages)
        except KvArenaError as error:
            self._refuse(str(error), tell=True)
            return
        if not known:
            self._emit(control.Connected())

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
        except KvArenaError as error:
            self._tell_failure(message.request.rid, str(error))
            return
        if problem := message.request.problem():
            self._tell_failure(message.request.rid, problem)
        else:
            self._queue.append(_Job(Sequence(message.request), lease))

    def _abort(self, rid: int) -> None:
        why = "aborted by the decode worker"
        for job in list(self._queue):
            if job.sequence.rid == rid:
                self._queue.remove(job)
                self._tell_failure(rid, why)
        if self._current and self._current[0].sequence.rid == rid:
            self._fail(self._current[0], why)
            self._current = None
        for job in self._sending:
            # What has been submitted cannot be called back: it ends, then the answer goes out.
            if job.sequence.rid == rid:
                job.failure = why

    def _advance(self) -> None:
        """Start the next prompt, or compute the current one's next chunk."""
        if self._current is None and self._queue:
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
            self._send(job)

    def _send(self, job: _Job) -> None:
        """Submit the writes of a prompt's pages; what cannot be submitted fails the request at once."""
        self._engine.book.pin(job.sequence)
        job.began = time.monotonic()
        self._sending.append(job)
        try:
            for moves in self._moves(job):
                job.pending.append(self._engine.channel.send(self._peer, job.lease, moves))
        except KvArenaError as error:
            # Batches before it may still be writing: `_poll` waits for them before it answers.
            job.failure = str(error)

    def _moves(self, job: _Job) -> list[dict[str, PageMoves]]:
        """The pages to write, `transfer_pages` a submission."""
        most = self._engine.config.transfer_pages
        moves = []
        for name, source in self._engine.book.physical_pages(job.sequence).items():
            target = job.lease.pages.get(name, ())
            if len(source) != len(target):
                raise PageError(f"{len(source)} pages of {name!r} were computed, {len(target)} are leased.")
            moves += [
                {name: PageMoves(source[start : start + most], target[start : start + most])}
                for start in range(0, len(source), most)
            ]
            job.written[name] = len(source)
        return moves

    def _poll(self, job: _Job) -> None:
        for pending in list(job.pending):
            try:
                if pending.done():
                    job.pending.remove(pending)
            except KvArenaError as error:
                job.pending.remove(pending)
                job.failure = job.failure or str(error)
        if job.pending:
            if time.monotonic() - job.began > self._timeout:
                self._sending.remove(job)
                what = f"its transfer did not end within {self._timeout:g} s"
                self._fail(job, what, settled=False)
            return
        self._sending.remove(job)
        if job.failure:
            self._fail(job, job.failure)
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
                f"{pages} pages moved in {milliseconds:.1f} ms"
            )
        )

    def _fail(self, job: _Job, what: str, *, settled: bool = True) -> None:
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
        jobs = [*self._queue, *([self._current[0]] if self._current else []), *self._sending]
        self._queue.clear()
        self._current = None
        self._sending.clear()
        for job in jobs:
            self._engine.book.release(job.sequence)


class _Job(msgspec.Struct):
    """A request on this side: queued, being computed, or being sent."""

    sequence: Sequence
    lease: Lease
    pending: list[Pending] = []
    written: dict[str, int] = {}
    choice: Choice | None = None
    failure: str = ""
    began: float = 0.0
