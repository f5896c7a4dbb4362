"""Prefill and decode in one process and one pool: what a pair's tokens are compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.requests import Request, Result, Sequence
from kvarena.plugin.engines.embedded.scheduler import ChunkedPrefill, DecodeBatch

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine

__all__ = ["SingleServer"]


class SingleServer:
    """Serves requests on one engine, with a late-backed or an eager pool alike.

    Parameters
    ----------
    engine : Engine
        Finalized.
    emit : callable
        Takes each `Result`.
    """

    def __init__(self, engine: Engine, emit: Callable[[Result], None]) -> None:
        self._engine = engine
        self._emit = emit
        self.batch = DecodeBatch(engine.config, engine.book, engine.runner)
        self._waiting: deque[Sequence] = deque()
        self._prefill: ChunkedPrefill | None = None

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._prefill or self._waiting or self.batch)

    def submit(self, request: Request) -> None:
        """Take a request."""
        if problem := request.problem():
            self._fail(Sequence(request), problem)
        else:
            self._waiting.append(Sequence(request))

    def step(self) -> None:
        """One prefill chunk, and one token for every running sequence."""
        self._advance_prefill()
        for sequence in self.batch.leave_finished():
            self._emit(sequence.result())
        for sequence in self.batch.step():
            self._fail(sequence, "the pool has no page left for its next token.")

    def run(self, requests: list[Request]) -> None:
        """Serve requests to their end."""
        for request in requests:
            self.submit(request)
        while self.busy:
            self.step()

    def _advance_prefill(self) -> None:
        engine = self._engine
        if self._prefill is None and self._waiting and not self.batch.full:
            sequence = self._waiting[0]
            try:
                admitted = engine.book.admit(sequence, generates=True)
            except KvArenaError as error:
                self._waiting.popleft()
                self._fail(sequence, str(error))
                return
            if admitted:
                self._waiting.popleft()
                self._prefill = ChunkedPrefill(engine.config, engine.book, engine.runner, sequence)
        if self._prefill is None:
            return
        sequence = self._prefill.sequence
        try:
            choice = self._prefill.step()
        except KvArenaError as error:
            self._prefill = None
            engine.book.release(sequence)
            self._fail(sequence, str(error))
            return
        if choice is not None:
            self._prefill = None
            sequence.append(choice.token, choice.logit, choice.margin)
            self.batch.join(sequence)

    def _fail(self, sequence: Sequence, what: str) -> None:
        self._emit(Result(sequence.rid, sequence.generated, "error", error=what))
