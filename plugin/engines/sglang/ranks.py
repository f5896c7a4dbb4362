"""Agreement of all ranks of a server on one size, and on whether everybody got it."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple, final

from kvarena.errors import KvArenaError
from kvarena.pool.sizing import RanksDisagreeError

__all__ = ["ROLL_CALL_TIMEOUT", "Ranks", "Report", "raise_if_failed"]

#: How long ranks wait for each other before they build their pools; they come from a collective of SGLang's
#: own, so that those that come at all are close together.
ROLL_CALL_TIMEOUT = datetime.timedelta(seconds=120)


class Report(NamedTuple):
    """What one rank says at one point of a resize."""

    stage: str
    """Where it is; a rank that failed early may be elsewhere than the others."""
    failure: str = ""
    """Why it cannot go on; empty: it can."""
    retry: bool = False
    """Whether this rank would try again with less."""
    tokens: int = 0
    nbytes: int = 0


@final
class Ranks:
    """The ranks of one server: all of its tensor- and pipeline-parallel processes.

    Every exchange has the same form at every stage, so that ranks meet in it even when one of them has
    failed and is at another stage: the others learn of it instead of waiting.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        A CPU group; None: there is only this process.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @classmethod
    def of_sglang(cls) -> Ranks:
        """SGLang's world group; a process without ``torch.distributed`` is alone."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        from sglang.srt.distributed.parallel_state import get_world_group

        group = get_world_group().cpu_group
        return cls(group if dist.get_world_size(group) > 1 else None)

    @property
    def count(self) -> int:
        """How many there are."""
        if self._group is None:
            return 1
        import torch.distributed as dist

        return dist.get_world_size(self._group)

    def roll_call(self) -> None:
        """Make sure that all ranks size their pools after capture, and not only those of some nodes.

        A node without ``KVARENA_ENABLE``, or on which kvarena does as stock does, would never come to an
        exchange. The others would wait there, or in SGLang's own reduction before it, for the group's
        timeout, which SGLang sets to two hours.

        Raises
        ------
        KvArenaError
            Ranks did not come within `ROLL_CALL_TIMEOUT`.
        """
        if self._group is None:
            return
        import torch.distributed as dist

        # Not a collective: those of gloo wait for the group's timeout, whatever a caller has set.
        store = self._group.get_group_store()
        keys = [f"kvarena/{rank}" for rank in range(self.count)]
        store.set(keys[dist.get_rank(self._group)], "here")
        try:
            store.wait(keys, ROLL_CALL_TIMEOUT)
        except RuntimeError as error:
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not _has(store, key))
            raise KvArenaError(
                f"Of {self.count} ranks, {missing or 'some'} did not begin to size their pools after capture "
                f"within {ROLL_CALL_TIMEOUT.total_seconds():g} s ({error}).",
                fix="Set KVARENA_ENABLE=1 and the same other KVARENA_* variables on every node, or on none. "
                "Where they are set, the node's log says why kvarena does as stock does there.",
            ) from error

    def exchange(self, mine: Report) -> list[Report]:
        """Every rank's report, in the order of ranks.

        Raises
        ------
        KvArenaError
            A rank has died, or was not heard for as long as the group waits.
        """
        if self._group is None:
            return [mine]
        import torch.distributed as dist

        everyone: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(everyone, tuple(mine), group=self._group)
        except RuntimeError as error:
            raise KvArenaError(
                f"At {mine.stage!r} of a resize, the other {self.count - 1} ranks cannot be heard: {error}.",
                fix="Look for the rank that ended or hangs in the other logs, then start the server anew.",
            ) from error
        return [Report(*report) for report in everyone]


def raise_if_failed(reports: list[Report], stage: str) -> None:
    """Raise `RanksDisagreeError` naming the ranks that failed, or that are at another stage."""
    failures = {
        rank: report.failure or f"it is at {report.stage!r}, the others at {stage!r}"
        for rank, report in enumerate(reports)
        if report.failure or report.stage != stage
    }
    if failures:
        raise RanksDisagreeError(failures, len(reports))


def _has(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # the process that keeps it, rank 0's, has ended
        return False
