"""What kvarena says inside SGLang: log lines, the status file, metrics, and the hooks that follow a pool."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.engines.sglang.page_usage import SglangPageUsage
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.observe.observation import Observation

if TYPE_CHECKING:
    from kvarena.plugin.engines.sglang.bound import SglangPool
    from kvarena.pool import PostCaptureKVResize

__all__ = ["announce_finalized", "announce_reserved", "watch"]

logger = logging.getLogger("kvarena.sglang")


def gpu_index(bound: SglangPool) -> int:
    """Which GPU of those that this process sees a pool is on; 0 for host memory."""
    return bound.device.index or 0


def announce_reserved(bound: SglangPool, *, reserve_ms: float, sink_ms: float) -> None:
    """A pool stands with its sink: start its report, and tell the hooks."""
    observer = _observation(bound, runtime.settings or Settings(enable=True))
    bound.announce.observer = observer
    observer.begin(bound, lambda: bound.ledgers)
    arena = bound.arena
    add = observer.timeline.add
    add("reserved", nbytes=arena.reserved_bytes, address=arena.base, milliseconds=reserve_ms)
    add("sink", nbytes=arena.backed_bytes, address=arena.base, milliseconds=sink_ms, sink=bound.sink_bytes)
    bound.announce.reserved(bound)


def _observation(bound: SglangPool, settings: Settings) -> Observation:
    if settings.metrics_port is None:
        return Observation(settings, name="sglang")
    # Every scheduler of a host has the same settings, and a GPU of its own.
    port = settings.metrics_port and settings.metrics_port + gpu_index(bound)
    try:
        return Observation(msgspec.structs.replace(settings, metrics_port=port), name="sglang")
    except ConfigError as error:
        logger.warning("kvarena: no metrics are served by this process: %s", error)
        return Observation(msgspec.structs.replace(settings, metrics_port=None), name="sglang")


def announce_finalized(
    bound: SglangPool, resize: PostCaptureKVResize, *, milliseconds: float, attempts: int, ranks: int
) -> None:
    """A pool has its size on every rank."""
    observer = bound.observer
    if observer is None:
        return
    observer.reporter.resize = resize
    observer.timeline.add(
        "finalized",
        nbytes=bound.total_bytes,
        address=bound.arena.base,
        milliseconds=milliseconds,
        gib=f"{bound.total_bytes / (1 << 30):.2f}",
        backed=bound.arena.backed_bytes,
        handles=len(bound.arena.mappings),
        reserved=bound.arena.reserved_bytes,
        full_tokens=resize.full_max_total_num_tokens,
        swa_tokens=resize.swa_max_total_num_tokens,
        retries=attempts,
        ranks=ranks,
        free=bound.driver.free_bytes(),
    )


def watch(bound: SglangPool, allocator: Any) -> None:
    """Show live and free pages of SGLang's allocator in the status."""
    if bound.observer is not None:
        bound.observer.reporter.watch(SglangPageUsage(allocator))
