"""The ranks of one server, and what they tell each other so that all have one size, or none has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, final

from kvarena.errors import KvArenaError
from kvarena.pool.sizing import RanksDisagreeError, agree

__all__ = ["Alone", "ProcessGroupRanks", "RankReport", "Ranks", "agreed_tokens", "raise_if_failed"]


class RankReport(NamedTuple):
    """What one rank says at one point of a resize."""

    stage: str
    """Where it is; a rank that failed early may be elsewhere than the others."""
    failure: str = ""
    """Why it cannot go on; empty: it can."""
    retry: bool = False
    """Whether this rank would try again with less."""
    tokens: int = 0
    nbytes: int = 0


class Ranks(Protocol):
    """All processes that must end with one size.

    Every exchange has the same form at every stage, so that ranks meet in it even when one of them has
    failed and is at another stage: the others learn of it instead of waiting.
    """

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def exchange(self, mine: RankReport) -> Sequence[RankReport]:
        """Every rank's report, in the order of ranks; raises `KvArenaError` when one cannot be heard."""
        ...


@final
class Alone:
    """The one rank of a server of one."""

    count = 1

    def exchange(self, mine: RankReport) -> Sequence[RankReport]:
        """The report itself."""
        return [mine]


@final
class ProcessGroupRanks:
    """The ranks of a group of ``torch.distributed``.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        One that exchanges objects in host memory, such as gloo's.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    @property
    def count(self) -> int:
        """The size of the group."""
        import torch.distributed as dist

        return dist.get_world_size(self.group)

    def exchange(self, mine: RankReport) -> Sequence[RankReport]:
        """Every rank's report, in the order of ranks.

        Raises
        ------
        KvArenaError
            A rank has died, or was not heard for as long as the group waits.
        """
        import torch.distributed as dist

        everyone: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(everyone, tuple(mine), group=self.group)
        except RuntimeError as error:
            raise KvArenaError(
                f"At {mine.stage!r} of a resize, the other {self.count - 1} ranks cannot be heard: {error}.",
                fix="Look for the rank that ended or hangs in the other logs, then start the server anew.",
            ) from error
        return [RankReport(*report) for report in everyone]


def raise_if_failed(reports: Sequence[RankReport], stage: str) -> None:
    """Raise `RanksDisagreeError` naming the ranks that failed, or that are at another stage."""
    failures = {rank: why for rank, report in enumerate(reports) if (why := _failure_of(report, stage))}
    if failures:
        raise RanksDisagreeError(failures, len(reports))


def agreed_tokens(reports: Sequence[RankReport], stage: str) -> int:
    """The tokens that every rank can hold.

    Raises
    ------
    RanksDisagreeError
        A rank failed, is at another stage, or can hold none.
    """
    return agree([_failure_of(report, stage) or report.tokens for report in reports])


def _failure_of(report: RankReport, stage: str) -> str:
    if report.failure or report.stage == stage:
        return report.failure
    return f"it is at {report.stage!r}, the others at {stage!r}"
