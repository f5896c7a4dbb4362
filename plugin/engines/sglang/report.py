"""What kvarena says inside SGLang: log lines, the status file, metrics, and the hooks that follow a pool."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.engines.sglang.page_usage import SglangPageUsage
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.observe.status.reporter import StatusReporter
from kvarena.plugin.observe.timeline import Timeline

if TYPE_CHECKING:
    from kvarena.plugin.engines.sglang.bound import SglangPool
    from kvarena.pool import PostCaptureKVResize

__all__ = ["PoolReport", "announce_finalized", "announce_reserved", "watch"]

logger = logging.getLogger("kvarena.sglang")


@final
class PoolReport:
    """The timeline, the status file and the metrics of one pool.

    Parameters
    ----------
    bound : BoundPool
        Whose they are.
    settings : Settings
        Whether a status is kept, and where metrics are served.
    """

    def __init__(self, bound: SglangPool, settings: Settings) -> None:
        self.timeline = Timeline()
        self.reporter = StatusReporter(
            settings, self.timeline, ledgers=lambda: tuple(bound.ledgers), name="sglang"
        )
        self._metrics: Any = None
        if settings.metrics_port is not None:
            from kvarena.plugin.observe.metrics import serve_metrics

            # Every scheduler of a host has the same settings, and a GPU of its own.
            port = settings.metrics_port and settings.metrics_port + gpu_index(bound)
            try:
                self._metrics = serve_metrics(self.reporter, port, settings.metrics_host)
            except ConfigError as error:
                logger.warning("kvarena: no metrics are served by this process: %s", error)
        self.reporter.begin(bound)  # type: ignore[arg-type]

    def close(self) -> None:
        """Remove the status file and stop serving."""
        self.reporter.close()
        if self._metrics is not None:
            self._metrics.close()


def gpu_index(bound: SglangPool) -> int:
    """Which GPU of those that this process sees a pool is on; 0 for host memory."""
    return bound.device.index or 0


def announce_reserved(bound: SglangPool, *, reserve_ms: float, sink_ms: float) -> None:
    """A pool stands with its sink: start its report, and tell the hooks."""
    report = PoolReport(bound, runtime.settings or Settings(enable=True))
    bound.report = report
    bound.on_close.append(report.close)
    arena = bound.arena
    add = report.timeline.add
    add("reserved", nbytes=arena.reserved_bytes, address=arena.base, milliseconds=reserve_ms)
    add("sink", nbytes=arena.backed_bytes, address=arena.base, milliseconds=sink_ms, sink=bound.sink_bytes)
    runtime.manager.hook.kvarena_pool_reserved(pool=bound)


def announce_finalized(
    bound: SglangPool, resize: PostCaptureKVResize, *, milliseconds: float, attempts: int, ranks: int
) -> None:
    """A pool has its size on every rank."""
    report: PoolReport | None = bound.report
    if report is None:
        return
    report.reporter.resize = resize
    report.timeline.add(
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
    if bound.report is not None:
        bound.report.reporter.watch(SglangPageUsage(allocator))
