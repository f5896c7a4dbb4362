"""Prompts whose pages are being written into a decode worker's pool."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.requests import Sequence
from kvarena.transfer import Lease, PageError, PageMoves

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.clock import AwakeClock
    from kvarena.plugin.engines.embedded.connecting import PeerConnection
    from kvarena.plugin.engines.embedded.engine import Engine
    from kvarena.plugin.engines.embedded.runner import Choice
    from kvarena.transfer import Pending

__all__ = ["Outbox", "PrefillJob"]

logger = logging.getLogger(__name__)

_MAX_RESENDS: Final = 2


class PrefillJob(msgspec.Struct, eq=False):
    """A request on the prefill side: queued, being computed, or being sent."""

    sequence: Sequence
    lease: Lease
    choice: Choice | None = None
    written: dict[str, int] = {}
    """Pages of each sub-pool that were submitted."""
    pending: list[Pending] = []
    submitted_at: float = 0.0
    """Monotonic seconds, for the report."""
    deadline: float = 0.0
    """By the server's clock."""
    failure: str = ""
    """Why it will not be delivered; empty as long as it may be."""
    resends: int = 0
    error: str = ""
    """Why a transfer that was under way failed."""
    failed_at: float | None = None
    """When all of it had ended then: it is written again once the peer has been heard since."""
    attempt: int | None = None
    """Of the connection that it waits for before it is written again."""


class Outbox:
    """Submits the writes of whole prompts, polls them, and repeats what a lost connection broke.

    Parameters
    ----------
    engine : Engine
    clock : AwakeClock
    timeout : float
        Seconds that one prompt's transfer may take in all.
    """

    def __init__(self, engine: Engine, clock: AwakeClock, timeout: float) -> None:
        self._engine = engine
        self._clock = clock
        self._timeout = timeout
        self._jobs: list[PrefillJob] = []
        self._quarantine: list[PrefillJob] = []
        self.resent = 0
        """Prompts that were written again after a transfer had failed."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def may_still_read(self) -> bool:
        """Whether transfers that nobody waits for can still read their pages and write the peer's."""
        return bool(self._quarantine)

    def send(self, peer: str, job: PrefillJob) -> None:
        """Pin a prompt's pages and submit their writes."""
        self._engine.book.pin(job.sequence)
        job.submitted_at = time.monotonic()
        job.deadline = self._clock.now() + self._timeout
        self._jobs.append(job)
        self._submit(peer, job)

    def abort(self, rid: int, why: str) -> None:
        """Deliver no longer. What has been submitted cannot be called back: it ends first."""
        for job in self._jobs:
            if job.sequence.rid == rid:
                job.failure = why

    def step(self, heard_at: float, connection: PeerConnection) -> list[PrefillJob]:
        """Take out the prompts that have ended: those with a `failure` were not delivered.

        A prompt whose `pending` is not empty has exceeded its time: its pages stay pinned, and are
        released in a later step, when the transfer engine has ended.

        Parameters
        ----------
        heard_at : float
            When the peer was last heard, by the clock.
        connection : PeerConnection
            Asked to connect again before a prompt is repeated.
        """
        self.release_ended()
        ended = [job for job in self._jobs if self._has_ended(job, heard_at, connection)]
        self._jobs = [job for job in self._jobs if job not in ended]
        for job in ended:
            self._release(job)
        return ended

    def drop_all(self) -> None:
        """Forget every prompt; the pages of those under way are released when they have ended."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            self._poll(job)
            self._release(job)
        self.release_ended()

    def abandon(self) -> None:
        """Release pages whatever reads them: nobody else gets them, for this process ends."""
        if self._quarantine:
            logger.warning("%d transfers have not ended, and are given up", len(self._quarantine))
        for job in self._quarantine:
            self._engine.book.release(job.sequence)
        self._quarantine.clear()

    def _release(self, job: PrefillJob) -> None:
        if job.pending:
            self._quarantine.append(job)
        else:
            self._engine.book.release(job.sequence)

    def release_ended(self) -> None:
        """Release the pages of prompts that nobody waits for, as soon as nothing reads them."""
        for job in list(self._quarantine):
            self._poll(job)
            if not job.pending:
                self._quarantine.remove(job)
                self._engine.book.release(job.sequence)

    def _submit(self, peer: str, job: PrefillJob) -> None:
        try:
            for moves in self._moves(job):
                job.pending.append(self._engine.channel.send(peer, job.lease, moves))
        except KvArenaError as error:
            # Batches before it may still be writing: they end before anyone is told.
            job.failure = str(error)

    def _moves(self, job: PrefillJob) -> list[dict[str, PageMoves]]:
        """The pages to write, `transfer_pages` a submission."""
        maximum = self._engine.config.transfer_pages
        moves = []
        for name, source in self._engine.book.physical_pages(job.sequence).items():
            target = job.lease.pages.get(name, ())
            if len(source) != len(target):
                raise PageError(f"{len(source)} pages of {name!r} were computed, {len(target)} are leased.")
            moves += [
                {name: PageMoves(source[start : start + maximum], target[start : start + maximum])}
                for start in range(0, len(source), maximum)
            ]
            job.written[name] = len(source)
        return moves

    def _has_ended(self, job: PrefillJob, heard_at: float, connection: PeerConnection) -> bool:
        self._poll(job)
        late = self._clock.now() > job.deadline
        if job.pending:
            if late:
                job.failure = f"its transfer did not end within {self._timeout:g} s"
            return late
        if job.failure or not job.error:
            return True
        if late or job.resends >= _MAX_RESENDS or self._engine.channel.leased is not None:
            # Leased pages are written once: an engine that sees to that has told the receiver already.
            job.failure = job.error
            return True
        if job.failed_at is None:
            job.failed_at = self._clock.now()
        elif heard_at > job.failed_at:
            self._resend(job, connection)
        return bool(job.failure)

    def _poll(self, job: PrefillJob) -> None:
        for pending in list(job.pending):
            try:
                if pending.done():
                    job.pending.remove(pending)
            except KvArenaError as error:
                job.pending.remove(pending)
                job.error = job.error or str(error)

    def _resend(self, job: PrefillJob, connection: PeerConnection) -> None:
        """Write all of a prompt again: its pages are pinned, and the lease on the others stands.

        After a lost connection an engine may have forgotten the peer, so it connects first.
        """
        if job.attempt is None:
            job.attempt = connection.renew()
        if not connection.ended(job.attempt):
            return
        if connection.error:
            job.failure = connection.error
        if job.failure or not connection.ready:
            return
        job.error, job.failed_at, job.attempt = "", None, None
        job.resends += 1
        self.resent += 1
        self._submit(connection.peer, job)
