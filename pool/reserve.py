"""What must stay free beside a KV pool: measured steps, a margin, and what is known to come later."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from kvarena.errors import KvArenaError

__all__ = ["MeasuredStep", "Reserve", "ReserveError", "Sizing", "StepPeaks", "decide", "reserve_of"]

_GIB = 1 << 30


class ReserveError(KvArenaError):
    """A measured figure cannot be used, or something is asked that was not measured."""


@final
@dataclass(frozen=True)
class MeasuredStep:
    """One step of the engine as it was run, with what it took.

    Attributes
    ----------
    name : str
        Which step.
    nbytes : int
        The most that the framework's allocator held during the step, beyond what it held before.
    requests : int
        Running requests in the step; 0: the step does not depend on their number.
    """

    name: str
    nbytes: int
    requests: int = 0

    def __post_init__(self) -> None:
        _require_count("nbytes", self.nbytes)
        _require_count("requests", self.requests)


@final
@dataclass(frozen=True)
class Reserve:
    """Bytes that must stay free, term by term.

    Attributes
    ----------
    step : str
        The measured step that decides.
    step_bytes : int
        What that step took.
    margin : float
        The share of `step_bytes` that is kept on top, for what the measured steps do not show.
    later : tuple of (str, int)
        Allocations that are known to follow, by name.
    headroom_bytes : int
        What the operator asked to keep free.
    floor_bytes : int
        `step_bytes` with its margin counts as at least this.
    """

    step: str
    step_bytes: int
    margin: float
    later: tuple[tuple[str, int], ...] = ()
    headroom_bytes: int = 0
    floor_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        """The step with its margin, or the floor."""
        return max(self.floor_bytes, self.step_bytes + math.ceil(self.step_bytes * self.margin))

    @property
    def total_bytes(self) -> int:
        """Bytes that stay free: activations, later allocations and headroom."""
        return self.activation_bytes + sum(nbytes for _, nbytes in self.later) + self.headroom_bytes

    def explain(self) -> str:
        """Every term in one line, in GiB."""
        if self.activation_bytes > self.step_bytes * (1 + self.margin) + 1:
            first = f"the floor {_gib(self.floor_bytes)} (step {self.step!r} takes {_gib(self.step_bytes)})"
        else:
            first = f"step {self.step!r} {_gib(self.step_bytes)} + {self.margin:.0%} margin"
        terms = [first, *(f"{name} {_gib(nbytes)}" for name, nbytes in self.later)]
        if self.headroom_bytes:
            terms.append(f"headroom {_gib(self.headroom_bytes)}")
        return f"{_gib(self.total_bytes)} GiB = {' + '.join(terms)}"

    def as_json(self) -> dict[str, Any]:
        """Every term in bytes, for a status file."""
        return {
            "total_bytes": self.total_bytes,
            "step": self.step,
            "step_bytes": self.step_bytes,
            "margin": self.margin,
            "later": dict(self.later),
            "headroom_bytes": self.headroom_bytes,
            "floor_bytes": self.floor_bytes,
        }


@final
class StepPeaks:
    """What steps take at any number of running requests, from those that were measured.

    Between two measured numbers of requests a step is taken to grow in a straight line; below the smallest,
    to take as much as there. Beyond the largest nothing is known.

    Parameters
    ----------
    steps : iterable of MeasuredStep
        Several of one name are one step at several numbers of requests.
    """

    def __init__(self, steps: Iterable[MeasuredStep]) -> None:
        self.steps = tuple(steps)
        if not self.steps:
            raise ReserveError("No step was measured.")
        self._points: dict[str, list[tuple[int, int]]] = {}
        for step in sorted(self.steps, key=lambda step: (step.requests, step.nbytes)):
            points = self._points.setdefault(step.name, [])
            # More requests never count as less memory, and of one number the larger figure counts.
            most = max(step.nbytes, points[-1][1] if points else 0)
            if points and points[-1][0] == step.requests:
                points.pop()
            points.append((step.requests, most))

    @property
    def max_requests(self) -> int:
        """The largest number of requests that was measured; 0: no step depends on it."""
        return max(step.requests for step in self.steps)

    def at(self, requests: int) -> tuple[str, int]:
        """The step that takes most at so many running requests, and its bytes.

        Raises
        ------
        ReserveError
            More requests than were measured.
        """
        if requests > self.max_requests > 0:
            raise ReserveError(
                f"{requests} running requests were not measured, at most {self.max_requests} were."
            )
        found = {name: _interpolated(points, requests) for name, points in self._points.items()}
        name = max(found, key=lambda name: (found[name], name))
        return name, found[name]


def reserve_of(
    peaks: StepPeaks,
    requests: int,
    *,
    margin: float,
    floor_bytes: int = 0,
    later: Sequence[tuple[str, int]] = (),
    headroom_bytes: int = 0,
) -> Reserve:
    """What must stay free when at most `requests` requests run."""
    if not 0 <= margin < math.inf:
        raise ReserveError(f"A margin of {margin} is not valid.")
    name, nbytes = peaks.at(requests)
    return Reserve(name, nbytes, margin, tuple(later), headroom_bytes, floor_bytes)


@final
@dataclass(frozen=True)
class Sizing:
    """What `decide` found.

    Attributes
    ----------
    pool_bytes : int
        What the pool may have.
    max_requests : int
        How many requests may run.
    reserve : Reserve
        What must stay free at that number.
    yields : str
        What gave way: ``""`` nothing, ``"requests"``, ``"tokens"``, or ``"reserve"`` where not even the
        fewest requests let the reserve fit beside the unmodified size.
    """

    pool_bytes: int
    max_requests: int
    reserve: Reserve
    yields: str = ""


def decide(
    peaks: StepPeaks,
    *,
    available_bytes: int,
    unmodified_bytes: int,
    limit: int,
    min_limit: int,
    limit_is_fixed: bool,
    margin: float,
    floor_bytes: int = 0,
    later: Sequence[tuple[str, int]] = (),
    headroom_bytes: int = 0,
) -> Sizing:
    """Size a pool so that the reserve fits, and never below what the unmodified engine takes.

    Parameters
    ----------
    peaks : StepPeaks
        Measured, at `limit` requests among others.
    available_bytes : int
        What is free now, with what the pool holds already.
    unmodified_bytes : int
        What the engine would have given the pool without us.
    limit, min_limit : int
        Running requests: how many the engine allows, and how many it may go down to.
    limit_is_fixed : bool
        The operator set `limit`: then the pool yields.

    Notes
    -----
    Where the reserve does not fit beside `unmodified_bytes`, the limit goes down to the largest that fits.
    """

    def at(requests: int) -> Reserve:
        return reserve_of(
            peaks,
            requests,
            margin=margin,
            floor_bytes=floor_bytes,
            later=later,
            headroom_bytes=headroom_bytes,
        )

    room = available_bytes - unmodified_bytes
    reserve = at(limit)
    if reserve.total_bytes <= room:
        return Sizing(available_bytes - reserve.total_bytes, limit, reserve)
    if limit_is_fixed and available_bytes > reserve.total_bytes:
        return Sizing(available_bytes - reserve.total_bytes, limit, reserve, "tokens")
    fewest = min(limit, max(1, min_limit))
    if limit_is_fixed or at(fewest).total_bytes > room:
        kept = limit if limit_is_fixed else fewest
        return Sizing(max(0, min(unmodified_bytes, available_bytes)), kept, at(kept), "reserve")
    low, high = fewest, limit  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).total_bytes <= room else (low, middle)
    reserve = at(low)
    return Sizing(available_bytes - reserve.total_bytes, low, reserve, "requests")


def _interpolated(points: list[tuple[int, int]], requests: int) -> int:
    index = bisect_left(points, (requests, -1))
    if index == len(points):
        return points[-1][1]
    (above, high) = points[index]
    if index == 0 or above == requests:
        return high
    below, low = points[index - 1]
    return low + -(-(high - low) * (requests - below) // (above - below))


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ReserveError(f"{name} is {value!r}, not a count.")


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f}"
