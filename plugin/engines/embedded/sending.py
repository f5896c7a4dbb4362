"""Prompts whose pages are being written into a decode worker's pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.requests import Sequence
from kvarena.transfer import Lease, PageError, PageMoves

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine
    from kvarena.plugin.engines.embedded.runner import Choice
    from kvarena.transfer import Pending

__all__ = ["Job", "Outbox"]

_MAX_RESENDS: Final = 2


class Job(msgspec.Struct, eq=False):
    """A request on the prefill side: queued, being computed, or being sent."""

    sequence: Sequence
    lease: Lease
    choice: Choice | None = None
    written: dict[str, int] = {}
    """Pages of each sub-pool that were submitted."""
    pending: list[Pending] = []
    began: float = 0.0
    failure: str = ""
    """Why it will not be delivered; empty as long as it may be."""
    settled: bool = True
    """Whether no write into the leased pages can still be under way, once it has ended."""
    resends: int = 0
    broke: str = ""
    """Why a transfer that was under way failed."""
    broke_at: float | None = None
    """When all of it had ended then: it is written again once the peer has been heard since."""


class Outbox:
    """Submits the writes of whole prompts, polls them, and repeats what a lost connection broke.

    Parameters
    ----------
    engine : Engine
    timeout : float
        Seconds that one prompt's transfer may take in all.
    """

    def __init__(self, engine: Engine, timeout: float) -> None:
        self._engine = engine
        self._timeout = timeout
        self._jobs: list[Job] = []
        self.resent = 0
        """Prompts that were written again after a transfer had failed."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def send(self, peer: str, job: Job) -> None:
        """Pin a prompt's pages and submit their writes."""
        self._engine.book.pin(job.sequence)
        job.began = time.monotonic()
        self._jobs.append(job)
        self._submit(peer, job)

    def abort(self, rid: int, why: str) -> None:
        """Deliver no longer. What has been submitted cannot be called back: it ends first."""
        for job in self._jobs:
            if job.sequence.rid == rid:
                job.failure = why

    def step(self, heard_at: float, reconnect: Callable[[], str]) -> list[Job]:
        """Take out the prompts that have ended: those with a `failure` were not delivered.

        Parameters
        ----------
        heard_at : float
            Monotonic seconds at which the peer was last heard.
        reconnect : callable
            Makes sure that the peer can be written to, and returns its key.
        """
        ended = [job for job in self._jobs if self._has_ended(job, heard_at, reconnect)]
        self._jobs = [job for job in self._jobs if job not in ended]
        return ended

    def drop_all(self) -> list[Job]:
        """Forget everything; the peer has been disconnected."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def _submit(self, peer: str, job: Job) -> None:
        try:
            for moves in self._moves(job):
                job.pending.append(self._engine.channel.send(peer, job.lease, moves))
        except KvArenaError as error:
            # Batches before it may still be writing: they end before anyone is told.
            job.failure = str(error)

    def _moves(self, job: Job) -> list[dict[str, PageMoves]]:
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

    def _has_ended(self, job: Job, heard_at: float, reconnect: Callable[[], str]) -> bool:
        self._poll(job)
        late = time.monotonic() - job.began > self._timeout
        if job.pending:
            if late:
                job.failure, job.settled = f"its transfer did not end within {self._timeout:g} s", False
            return late
        if job.failure or not job.broke:
            return True
        if late or job.resends >= _MAX_RESENDS or self._engine.channel.leased is not None:
            # Leased pages are written once: an engine that sees to that has told the receiver already.
            job.failure = job.broke
            return True
        if job.broke_at is None:
            job.broke_at = time.monotonic()
        elif heard_at > job.broke_at:
            self._resend(job, reconnect)
        return False

    def _poll(self, job: Job) -> None:
        for pending in list(job.pending):
            try:
                if pending.done():
                    job.pending.remove(pending)
            except KvArenaError as error:
                job.pending.remove(pending)
                job.broke = job.broke or str(error)

    def _resend(self, job: Job, reconnect: Callable[[], str]) -> None:
        """Write all of a prompt again: its pages are pinned, and the lease on the others stands."""
        job.broke, job.broke_at = "", None
        job.resends += 1
        self.resent += 1
        try:
            peer = reconnect()
        except KvArenaError as error:
            job.failure = str(error)
            return
        self._submit(peer, job)
