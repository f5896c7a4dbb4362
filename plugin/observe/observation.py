"""Everything that watches one pool for others: its timeline, its status file and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from kvarena.plugin.config import Settings
from kvarena.plugin.observe.status.reporter import StatusReporter
from kvarena.plugin.observe.timeline import Timeline

if TYPE_CHECKING:
    from kvarena.plugin.observe.metrics import MetricsServer
    from kvarena.pool import UnifiedPool
    from kvarena.transfer import RegistrationLedger

__all__ = ["Observation"]


@final
class Observation:
    """Made before a pool is, handed to its life, which tells it what happens.

    Parameters
    ----------
    settings : Settings
        Whether a status is kept and metrics are served, and where.
    name : str
        What ``kvarena status`` calls this process; by default the program's name.

    Raises
    ------
    MetricsPortError
        ``metrics_port`` is taken.
    """

    def __init__(self, settings: Settings, *, name: str = "") -> None:
        self.timeline = Timeline()
        self._ledgers: Callable[[], Sequence[RegistrationLedger]] = tuple
        self.reporter = StatusReporter(settings, self.timeline, ledgers=lambda: self._ledgers(), name=name)
        self._metrics: MetricsServer | None = None
        if settings.metrics_port is not None:
            from kvarena.plugin.observe.metrics import serve_metrics

            self._metrics = serve_metrics(self.reporter, settings.metrics_port, settings.metrics_host)

    def begin(self, pool: UnifiedPool, ledgers: Callable[[], Sequence[RegistrationLedger]]) -> None:
        """A pool is reserved; `ledgers` answers those of its transfer engines at any time."""
        self._ledgers = ledgers
        self.reporter.begin(pool)

    def close(self) -> None:
        """Remove the status file and stop serving; a second call does nothing."""
        self.reporter.close()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
