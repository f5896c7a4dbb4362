"""A clock that stands still while nobody looks at it: pauses of this process are not a peer's silence."""

from __future__ import annotations

import math
import time

__all__ = ["AwakeClock"]


class AwakeClock:
    """Seconds during which a server has run, as its deadlines count them.

    A stopped process (SIGSTOP, ``docker pause``, a VM that is snapshotted or migrated) finds, when it
    goes on, that much time has passed in which it could not hear anybody. Each step of a server calls
    `tick`; whatever passed between two ticks beyond `max_step` does not count, so a peer that was stopped at
    the same time still has the rest of its period to be heard.

    Parameters
    ----------
    max_step : float
        The most seconds that count between two ticks. Half of the shortest deadline that is measured
        with this clock: then no single pause can exceed that deadline.
    """

    def __init__(self, max_step: float = math.inf) -> None:
        self.max_step = max_step
        self._looked = time.monotonic()
        self._now = 0.0

    def tick(self) -> float:
        """Count the time since the last tick; returns the time now."""
        looked = time.monotonic()
        self._now += min(looked - self._looked, self.max_step)
        self._looked = looked
        return self._now

    def now(self) -> float:
        """Seconds that had counted at the last tick."""
        return self._now
