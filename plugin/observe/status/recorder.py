"""Samples of an arena over time, few enough for a file however long the process runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, final

from kvarena.plugin.observe.status.collect import sample
from kvarena.plugin.observe.status.model import ArenaHistory, EventMark, Sample
from kvarena.plugin.observe.status.usage import PageUsage
from kvarena.plugin.observe.timeline import Timeline

if TYPE_CHECKING:
    from kvarena.pool import UnifiedPool
    from kvarena.transfer import RegistrationLedger

__all__ = ["Recorder"]

_MAX_SAMPLES: Final = 600
_MAX_MARKS: Final = 200
_FIRST_INTERVAL_S: Final = 0.05


@final
class Recorder:
    """Keeps samples at a steady pace, which halves whenever there are too many, and one at each event.

    The pace is that of what is kept: whoever calls more often, such as once a second, loses nothing.

    Parameters
    ----------
    timeline : Timeline
        Gives the clock and the events.
    title : str
        Of the picture.
    """

    def __init__(self, timeline: Timeline, title: str) -> None:
        self.interval_s = _FIRST_INTERVAL_S
        """Seconds between two samples that are kept, now."""
        self._timeline = timeline
        self._lock = threading.Lock()
        self._steady: list[Sample] = []
        self._marks: list[Sample] = []
        self._history = ArenaHistory(title=title, began_at=timeline.began_at)

    def begin(self, pool: UnifiedPool) -> None:
        """Remember what does not change in a pool's life."""
        self._history.reserved_bytes = pool.arena.reserved_bytes
        self._history.sink_bytes = pool.sink_bytes
        self._history.sub_pools = tuple((spec.name, spec.grow_direction) for spec in pool.sub_pool_specs)

    def record(
        self,
        pool: UnifiedPool | None,
        ledgers: Iterable[RegistrationLedger],
        usage: Mapping[str, PageUsage],
        *,
        mark: bool = False,
    ) -> None:
        """Take a sample if one is due; one at an event (`mark`) is always due, and outlives the thinning."""
        if pool is None or not (mark or self._due()):
            return
        taken = sample(self._timeline.now_s, pool, ledgers, usage)
        with self._lock:
            if mark:
                self._marks.append(taken)
                # The first and the last tell most: how it came to serve, and what is happening now.
                del self._marks[_MAX_MARKS // 4 : -_MAX_MARKS * 3 // 4]
                return
            self._steady.append(taken)
            if len(self._steady) > _MAX_SAMPLES:
                del self._steady[1::2]
                self.interval_s *= 2

    def _due(self) -> bool:
        with self._lock:
            return not self._steady or self._timeline.now_s - self._steady[-1].at_s >= self.interval_s

    def history(self) -> ArenaHistory:
        """What has been recorded, in order."""
        with self._lock:
            samples = sorted([*self._steady, *self._marks], key=lambda each: each.at_s)
        events = [
            EventMark(event.at_s, event.name, event.nbytes, event.milliseconds or 0.0)
            for event in list(self._timeline.events)
        ]
        del events[_MAX_MARKS // 4 : -_MAX_MARKS * 3 // 4]
        recorded = self._history
        return ArenaHistory(
            title=recorded.title,
            began_at=recorded.began_at,
            reserved_bytes=recorded.reserved_bytes,
            sink_bytes=recorded.sink_bytes,
            sub_pools=recorded.sub_pools,
            samples=samples,
            events=events,
        )
