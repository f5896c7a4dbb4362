"""When pages may move on a prefill or decode server: SGLang's own condition, and one that it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarena.plugin.engines.sglang.bound import bound_of

__all__ = ["move_gate"]


def move_gate(original: Callable[[Any], Callable[[], bool]], scheduler: Any) -> Callable[[], bool]:
    """Around ``unified_memory_disagg_move_gate``: no page moves while an aborted transfer may still write.

    A decode server that aborts a request holds its pages until every prefill rank has said that it no
    longer writes them (*deferred releases*). The request is in no queue by then, and up to 0.5.23 SGLang's
    gate looks at queues alone: compaction could give a page that is still written to another request.
    """
    gate = original(scheduler)
    if bound_of(scheduler.token_to_kv_pool_allocator) is None:
        return gate

    def nothing_writes() -> bool:
        # Looked up each time: a server that switches its role makes another queue.
        queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
        return gate() and (queue is None or not queue.has_pending_deferred_releases())

    return nothing_writes
