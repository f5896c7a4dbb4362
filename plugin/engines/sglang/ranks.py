"""SGLang's ranks: who they are, and whether all of them have come."""

from __future__ import annotations

import datetime
from typing import Any

from kvarena.errors import KvArenaError
from kvarena.plugin.ranks import Alone, ProcessGroupRanks, Ranks

__all__ = ["ROLL_CALL_TIMEOUT", "ranks_of_sglang", "roll_call"]

#: How long ranks wait for each other before they build their pools; they come from a collective of SGLang's
#: own, so that those that come at all are close together.
ROLL_CALL_TIMEOUT = datetime.timedelta(seconds=120)


def ranks_of_sglang() -> Ranks:
    """All tensor- and pipeline-parallel processes; a process without ``torch.distributed`` is alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group().cpu_group
    return ProcessGroupRanks(group) if dist.get_world_size(group) > 1 else Alone()


def roll_call(ranks: Ranks) -> None:
    """Make sure that all ranks size their pools after capture, and not only those of some nodes.

    A node without ``KVARENA_ENABLE``, or on which SGLang runs unmodified, would never come to an
    exchange. The others would wait there, or in SGLang's own reduction before it, for the group's
    timeout, which SGLang sets to two hours.

    Raises
    ------
    KvArenaError
        Ranks did not come within `ROLL_CALL_TIMEOUT`.
    """
    if not isinstance(ranks, ProcessGroupRanks):
        return
    import torch.distributed as dist

    # Not a collective: those of gloo wait for the group's timeout, whatever a caller has set.
    store = ranks.group.get_group_store()
    keys = [f"kvarena/{rank}" for rank in range(ranks.count)]
    store.set(keys[dist.get_rank(ranks.group)], "here")
    try:
        store.wait(keys, ROLL_CALL_TIMEOUT)
    except RuntimeError as error:
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not _has(store, key))
        raise KvArenaError(
            f"Of {ranks.count} ranks, {missing or 'some'} did not begin to size their pools after capture "
            f"within {ROLL_CALL_TIMEOUT.total_seconds():g} s ({error}).",
            fix="Set KVARENA_ENABLE=1 and the same other KVARENA_* variables on every node, or on none. "
            "Where they are set, the node's log says why SGLang runs unmodified there.",
        ) from error


def _has(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # the process that keeps it, rank 0's, has ended
        return False
