"""Watches one pool for others: keeps its history, and its status file up to date."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from kvarena.errors import KvArenaError
from kvarena.plugin.config import Settings
from kvarena.plugin.observe.status.collect import collect
from kvarena.plugin.observe.status.files import StatusFile, clean, directory_of
from kvarena.plugin.observe.status.identity import identity
from kvarena.plugin.observe.status.model import ArenaHistory, PoolLabels, PoolStatus, ProcessStatus
from kvarena.plugin.observe.status.recorder import Recorder
from kvarena.plugin.observe.status.usage import PageUsage, UsageSource, usage_of
from kvarena.plugin.observe.tally import Tally
from kvarena.plugin.observe.timeline import Event, Timeline

if TYPE_CHECKING:
    from kvarena.pool import PostCaptureKVResize, UnifiedPool
    from kvarena.transfer import RegistrationLedger

__all__ = ["StatusReporter"]

logger = logging.getLogger(__name__)

_WRITE_EVERY_S: Final = 1.0
#: Between two samples at first; the recorder keeps fewer of them as time goes on.
_LOOK_EVERY_S: Final = 0.05


@final
class StatusReporter:
    """What one pool tells the outside; driven by `PoolLifecycle`, or by an engine that has its own.

    It never fails the engine, and nothing but `close` ends it: a status file that cannot be written is
    reported once, and tried again. The file is written every second as long as the process lives, so that
    whoever is silent for longer hangs.

    Parameters
    ----------
    settings : Settings
        ``status`` and ``socket_dir`` count here.
    timeline : Timeline
        Of the pool; each event is a moment of the history.
    ledgers : callable
        Answers the ledgers of the transfer engines as they are now.
    name : str
        What ``kvarena status`` calls the process.
    """

    def __init__(
        self,
        settings: Settings,
        timeline: Timeline,
        *,
        ledgers: Callable[[], Sequence[RegistrationLedger]] = tuple,
        name: str = "",
    ) -> None:
        self.name = name or _program()
        self.metrics_address: str | None = None
        """Where this process serves its metrics, for whoever reads the status."""
        self.labels = PoolLabels()
        """Role, model and rank, for metrics; set by the engine."""
        self.tally = Tally()
        """Counts of what has been decided so far."""
        self.resize: PostCaptureKVResize | None = None
        """The size that the engine serves with; None: not yet decided."""
        self.timeline = timeline
        self._settings = settings
        self._ledgers = ledgers
        self._pool: UnifiedPool | None = None
        self._source: UsageSource | None = None
        self._source_failed = False
        self._lock = threading.Lock()
        self._recorder = Recorder(timeline, self.name)
        self._file: StatusFile | None = None
        self._write_failed = False
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        for event in timeline.events:
            self.tally.add(event)
        timeline.listeners.append(self._on_event)

    def begin(self, pool: UnifiedPool) -> None:
        """The pool is reserved: from now on there is something to tell."""
        self._pool = pool
        self._recorder.begin(pool)
        if self._settings.status and self._file is None:
            self._open_file(directory_of(self._settings))
        self.record()
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="kvarena-status", daemon=True)
            self._thread.start()

    def watch(self, allocator: object) -> None:
        """Read live and free pages from an allocator, or from any `UsageSource`; one of neither is let be."""
        self._source = usage_of(allocator) or self._source
        self._source_failed = False

    def record(self) -> None:
        """Take a sample for the history now, and have the file written soon."""
        try:
            self._recorder.record(self._pool, self._ledgers(), self._usage(), mark=True)
        except Exception:  # the engine's own thread is here
            logger.debug("kvarena: the pool could not be read", exc_info=True)
        self._wake.set()

    def pool_status(self) -> PoolStatus:
        """The pool as it is now."""
        return collect(self._pool, self._ledgers(), usage=self._usage(), resize=self.resize)

    def status(self) -> ProcessStatus:
        """What the status file says."""
        return ProcessStatus(
            identity=identity(),
            name=self.name,
            written_at=time.time(),
            pool=self.pool_status(),
            refusals=tuple(self.tally.refusals),
            labels=self.labels,
            metrics_address=self.metrics_address,
            history=self.history(),
        )

    def history(self) -> ArenaHistory:
        """The arena over time, until now."""
        return self._recorder.history()

    def close(self) -> None:
        """Stop, and remove the file; a second call does nothing."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        self._pool = None
        self._source = None
        if self._file is not None:
            self._file.remove()
            self._file = None
        if self._on_event in self.timeline.listeners:
            self.timeline.listeners.remove(self._on_event)

    def _on_event(self, event: Event) -> None:
        self.tally.add(event)
        self.record()

    def _run(self) -> None:
        written = 0.0
        while not self._stopping:
            try:
                due = self._wake.wait(min(max(self._recorder.interval_s, _LOOK_EVERY_S), _WRITE_EVERY_S))
                self._wake.clear()
                if self._stopping:
                    return
                self._recorder.record(self._pool, self._ledgers(), self._usage())
                if due or time.monotonic() - written >= _WRITE_EVERY_S:
                    written = time.monotonic()
                    self._write()
            except Exception:  # an observer must not take its engine down, nor end before it
                logger.debug("kvarena: the status could not be read; trying again", exc_info=True)

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self.status())
        except (OSError, KvArenaError) as error:
            # It stays ours: what it said last is taken away in the end, and a disk does not stay full.
            if not self._write_failed:
                logger.warning("kvarena: %s cannot be written, trying again: %s", self._file.path, error)
            self._write_failed = True
        else:
            self._write_failed = False

    def _open_file(self, directory: Path) -> None:
        try:
            self._file = StatusFile(directory)
            for dead in clean(directory):
                if dead.status is not None:
                    name, pid = dead.status.name, dead.status.identity.pid
                    logger.info("kvarena: removed the status file of %r, pid %d, which has ended", name, pid)
        except (KvArenaError, OSError) as error:
            if self._file is None:
                logger.warning("kvarena: no status is kept: %s", error)
            else:
                logger.debug("kvarena: what dead processes left could not be removed", exc_info=True)

    def _usage(self) -> Mapping[str, PageUsage]:
        if self._source is None or self._pool is None or not self._pool.finalized:
            return {}
        try:
            return self._source.page_usage()
        except Exception:
            # The engine's thread and ours may both be here.
            with self._lock:
                first, self._source_failed = not self._source_failed, True
            if first:
                logger.warning("kvarena: live and free pages cannot be read", exc_info=True)
            return {}


def _program() -> str:
    """``"sglang"``, ``"worker"``: the script that runs, or the module under ``python -m``."""
    script = Path(sys.argv[0] if sys.argv else "")
    name = script.parent.name if script.name == "__main__.py" else script.stem
    return name or f"pid {os.getpid()}"
