"""Prefill in chunks, and decode with continuous batching: one turn of each at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.requests import Sequence
from kvarena.plugin.engines.embedded.runner import Choice, Row

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.config import EngineConfig
    from kvarena.plugin.engines.embedded.page_book import PageBook
    from kvarena.plugin.engines.embedded.runner import StepRunner

__all__ = ["ChunkedPrefill", "DecodeBatch", "OutOfPages"]


class OutOfPages(KvArenaError):
    """An admitted sequence found no free page; the sequences that run are not touched."""


class ChunkedPrefill:
    """Computes one prompt's KV, a chunk at each turn.

    Parameters
    ----------
    config : EngineConfig
    book : PageBook
        In which `sequence` has been admitted.
    runner : StepRunner
    sequence : Sequence
    """

    def __init__(self, config: EngineConfig, book: PageBook, runner: StepRunner, sequence: Sequence) -> None:
        self.sequence = sequence
        self._config = config
        self._book = book
        self._runner = runner
        self._done = 0

    def step(self) -> Choice | None:
        """Compute the next chunk; returns the first generated token after the last one.

        Raises
        ------
        OutOfPages
            The pool has none left, pinned ones being in the way.
        """
        tokens = self.sequence.request.tokens
        end = min(self._done + self._config.chunk, len(tokens))
        if not self._book.extend(self.sequence, end):
            raise OutOfPages(f"no page is free for tokens {self._done} to {end} of the prompt.")
        choice = self._runner.prefill(
            Row(tokens=tokens[self._done : end], position=self._done, pages=self.sequence.pages)
        )
        self._done = end
        self._book.trim(self.sequence, end)
        return choice if end == len(tokens) else None


class DecodeBatch:
    """The sequences that are being decoded; they join and leave between steps.

    Parameters
    ----------
    config : EngineConfig
    book : PageBook
    runner : StepRunner
    """

    def __init__(self, config: EngineConfig, book: PageBook, runner: StepRunner) -> None:
        self._config = config
        self._book = book
        self._runner = runner
        self.running: list[Sequence] = []
        self.steps = 0
        self.widest = 0
        """The most rows that one step had."""

    def __len__(self) -> int:
        return len(self.running)

    @property
    def full(self) -> bool:
        """Whether no further sequence may join."""
        return len(self.running) >= self._config.max_running

    def join(self, sequence: Sequence) -> None:
        """A sequence whose prompt's KV and first token are there."""
        self.running.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Leave before the end; the pages go back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._book.release(sequence)

    def leave_finished(self) -> list[Sequence]:
        """Take out the sequences that have ended, with their pages."""
        finished = [sequence for sequence in self.running if sequence.finished]
        for sequence in finished:
            self.drop(sequence)
        return finished

    def step(self) -> list[Sequence]:
        """One token for every running sequence; returns those for which the pool had no page.

        They are out of the batch and hold nothing; with admission by bytes that happens only when
        pages in flight keep others from being moved together.
        """
        starved = [s for s in self.running if not self._book.extend(s, s.position + 1)]
        for sequence in starved:
            self.drop(sequence)
        if not self.running:
            return starved
        rows = [
            Row(tokens=sequence.generated[-1:], position=sequence.position, pages=sequence.pages)
            for sequence in self.running
        ]
        for sequence, choice in zip(self.running, self._runner.decode(rows), strict=True):
            sequence.append(choice.token, choice.logit, choice.margin)
            self._book.trim(sequence, sequence.position)
        self.steps += 1
        self.widest = max(self.widest, len(rows))
        return starved
