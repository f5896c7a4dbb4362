"""Before SGLang resizes its pool: measure, lower the limit of requests where it must be, and say so."""

from __future__ import annotations

import logging
from typing import Any

from kvarena.plugin.config import Settings
from kvarena.plugin.engines.sglang.bound import SglangPool
from kvarena.plugin.engines.sglang.measure.server import MeasuredServer
from kvarena.plugin.engines.sglang.measure.sizing import PoolSizing, size_pool
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.ranks import Ranks

__all__ = ["size_before_resize"]

logger = logging.getLogger("kvarena.sglang")


def size_before_resize(bound: SglangPool, runner: Any, ranks: Ranks) -> PoolSizing | None:
    """What the pool is to have; None: this release tells no size of its own, and SGLang's budget counts.

    `runner` gets the lower limit of requests, if there is one; its caller puts it back when the resize fails.

    Raises
    ------
    KvArenaError
        The other ranks cannot be heard.
    """
    if runtime.unmodified_bytes is None:
        return None
    server = MeasuredServer(
        runner=runner,
        server_args=runner.server_args,
        settings=runtime.settings or Settings(enable=True),
        ranks=ranks,
        unmodified_bytes=min(runtime.unmodified_bytes, bound.reserved_bytes),
        backed_bytes=bound.backed_bytes,
        free_bytes=bound.driver.free_bytes(),
        page_bytes=sum(bound.page_bytes(spec.name) for spec in bound.sub_pool_specs),
        page_size=bound.page_size,
        bytes_per_token=bound.reserved_bytes / max(1, int(runner.max_total_num_tokens)),
    )
    found = size_pool(server)
    if found.max_requests is not None:
        for owner in (runner, getattr(runner, "memory_pool_config", None)):
            if owner is not None:
                owner.max_running_requests = found.max_requests
    lowered = found.price is None or found.price.sizing.yields
    logger.log(logging.WARNING if lowered else logging.INFO, "kvarena: %s.", found.line.rstrip("."))
    if bound.observer is not None and found.price is not None:
        bound.observer.timeline.add("reserve", **_plain(found.price.as_json()))
    return found


def _plain(told: dict[str, Any]) -> dict[str, Any]:
    """One level of names, as events have it."""
    reserve = told.pop("reserve")
    told["step"], told["step_bytes"] = reserve["step"], reserve["step_bytes"]
    return told | {"stays_free": reserve["total_bytes"]}
