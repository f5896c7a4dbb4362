"""What is counted of a timeline's events, however many of them it has let go."""

from __future__ import annotations

from collections import Counter
from typing import Final, final

from kvarena.plugin.observe.timeline import Event
from kvarena.transfer.registration.traffic import Histogram

__all__ = ["Tally"]

# One handle over 136 GiB takes 4 ms on an H200 and its zeroing 43; thousands of handles take seconds.
_FINALIZE_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_MAX_REASONS: Final = 100


@final
class Tally:
    """Refusals by reason, and how long the finalizes took.

    Attributes
    ----------
    refusals : Counter of str
        By code; codes beyond the first hundred are counted as ``"other"``.
    """

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        self._finalized = [0] * (len(_FINALIZE_BOUNDS_S) + 1)
        self._seconds = 0.0

    def add(self, event: Event) -> None:
        """Count one event, if it is of a kind that is counted."""
        if event.name == "refused":
            code = str(event.details.get("code", "unknown"))
            known = code in self.refusals or len(self.refusals) < _MAX_REASONS
            self.refusals[code if known else "other"] += 1
        elif event.name == "finalized":
            seconds = (event.milliseconds or 0.0) / 1e3
            self._finalized[sum(bound < seconds for bound in _FINALIZE_BOUNDS_S)] += 1
            self._seconds += seconds

    @property
    def finalize_seconds(self) -> Histogram:
        """Of every finalize so far, in seconds."""
        return Histogram(_FINALIZE_BOUNDS_S, tuple(self._finalized), self._seconds)
