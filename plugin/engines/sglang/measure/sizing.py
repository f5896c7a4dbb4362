"""How large the pool becomes: never below what unmodified SGLang takes, and the rest as measured."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, final

from kvarena.plugin.engines.sglang.measure.errors import MeasureError, ProfileError
from kvarena.plugin.engines.sglang.measure.price import Price
from kvarena.plugin.engines.sglang.measure.profile import Profile, ProfileStore
from kvarena.plugin.engines.sglang.measure.run import measure
from kvarena.plugin.engines.sglang.measure.server import MeasuredServer
from kvarena.plugin.engines.sglang.measure.steps import DECODE, Workload, steps_at, steps_between
from kvarena.plugin.engines.sglang.measure.unmodified import fraction_is_given
from kvarena.plugin.ranks import RankReport
from kvarena.pool.reserve import MeasuredStep, Sizing, StepPeaks, decide, reserve_of

__all__ = ["PoolSizing", "size_pool"]

logger = logging.getLogger("kvarena.sglang")

_GIB = 1 << 30
#: How often a lower limit is measured before what was measured last counts.
_ROUNDS = 3


@final
@dataclass(frozen=True)
class PoolSizing:
    """What a resize takes instead of SGLang's own budget.

    Attributes
    ----------
    pool_bytes : int
        Of this rank.
    max_requests : int or None
        A lower limit of running requests; None: SGLang's stands.
    stays_free_bytes : int
        What must stay free beside the pool, should the resize be tried again with less.
    line : str
        For the log.
    price : Price or None
        None: nothing was measured.
    """

    pool_bytes: int
    max_requests: int | None
    stays_free_bytes: int
    line: str
    price: Price | None = None


@final
@dataclass(frozen=True)
class _Plan:
    """What is known before any step runs."""

    work: Workload
    limit: int
    fixed: bool
    terms: dict[str, Any]
    store: ProfileStore | None = None
    key: dict[str, str] | None = None


def size_pool(server: MeasuredServer) -> PoolSizing:
    """Measure, or say why not, and decide; every rank comes to the same limit.

    A measurement that fails, or that is refused, is no error: the pool gets exactly the unmodified size, on
    every rank.

    Raises
    ------
    KvArenaError
        The other ranks cannot be heard.
    """
    plan, why = _prepared(server)
    try:
        _exchange(server, RankReport("reserve", failure=why))
        assert plan is not None
        return _measured(server, plan)
    except MeasureError as error:
        nbytes = server.unmodified_bytes
        free = max(0, server.free_bytes + server.backed_bytes - nbytes)
        line = f"the pool gets the size of unmodified SGLang, {nbytes / _GIB:.2f} GiB: {error.what}"
        return PoolSizing(nbytes, None, min(free, server.settings.headroom), line)


def _prepared(server: MeasuredServer) -> tuple[_Plan | None, str]:
    """The plan, or why there is none."""
    try:
        if fraction_is_given(server.server_args):
            return None, "--mem-fraction-static is given, which decides the size"
        refusal = server.refusal()
        if refusal:
            return None, refusal
        work = server.workload()
        fixed = server.limit_is_given
        limit = work.min_limit if server.settings.max_running == "graphs" and not fixed else work.limit
        plan = _Plan(work, limit, fixed, server.terms(work))
        if server.settings.profile_dir:
            store = ProfileStore(server.settings.profile_dir)
            plan = dataclasses.replace(plan, store=store, key=server.key())
        return plan, ""
    except Exception as error:  # noqa: BLE001 - what SGLang keeps where may have changed; the ranks must hear
        return None, f"what to measure cannot be read ({error!r})"


def _measured(server: MeasuredServer, plan: _Plan) -> PoolSizing:
    work = plan.work
    steps, unseen, source = _steps_of(server, plan)
    if any(step.name == DECODE for step in steps) and work.graph_requests:
        steps = [*steps, MeasuredStep(DECODE, 0, work.graph_requests)]  # its memory is the graphs'
    if unseen:
        terms = plan.terms | {"later": (*plan.terms["later"], ("what torch does not see", unseen))}
        plan = dataclasses.replace(plan, terms=terms)
    room = _room(server)
    sizing = _agreed(server, plan, steps, room)
    for _ in range(_ROUNDS):
        lower = sizing.max_requests
        if lower >= plan.limit or lower in _measured_at(steps):
            break
        more, _unseen = measure(
            server.runner, steps_at(work, lower), ranks=server.ranks, meter=server.measuring()
        )
        steps = [*steps, *more]
        sizing = _agreed(server, plan, steps, room)
    else:
        # Only a limit whose steps were run is promised.
        below = max((at for at in _measured_at(steps) if at <= sizing.max_requests), default=1)
        sizing = _agreed(server, dataclasses.replace(plan, limit=below), steps, room)
    if sizing.max_requests < plan.limit and not sizing.yields:
        sizing = dataclasses.replace(sizing, yields="requests")
    price = Price(
        sizing=sizing,
        limit=work.limit,
        graph_requests=work.graph_requests,
        at_graphs=reserve_of(StepPeaks(steps), min(plan.limit, work.min_limit), **plan.terms),
        bytes_per_token=server.bytes_per_token,
        source=source,
    )
    lowered = sizing.max_requests if sizing.max_requests < work.limit else None
    left = max(0, server.unmodified_bytes + room - sizing.pool_bytes)
    return PoolSizing(sizing.pool_bytes, lowered, left, price.line(), price)


def _measured_at(steps: list[MeasuredStep]) -> set[int]:
    return {step.requests for step in steps if step.requests and step.name != DECODE}


def _agreed(server: MeasuredServer, plan: _Plan, steps: list[MeasuredStep], room: int) -> Sizing:
    """Decided with the limit that every rank can have: settings may differ between hosts."""
    peaks = StepPeaks(steps)

    def at(limit: int, *, fixed: bool) -> Sizing:
        return decide(
            peaks,
            available_bytes=max(0, server.unmodified_bytes + room),
            unmodified_bytes=server.unmodified_bytes,
            limit=limit,
            min_limit=plan.work.min_limit,
            limit_is_fixed=fixed,
            **plan.terms,
        )

    mine = at(plan.limit, fixed=plan.fixed)
    reports = _exchange(server, RankReport("limit", tokens=mine.max_requests))
    lowest = min(report.tokens for report in reports)
    if lowest == mine.max_requests:
        return mine
    return dataclasses.replace(at(lowest, fixed=False), yields="requests", max_requests=lowest)


def _room(server: MeasuredServer) -> int:
    """What is free beside the unmodified size, on the rank that has least of it."""
    room, failure = 0, ""
    try:
        room = server.free_now() + server.backed_bytes - server.unmodified_bytes
    except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
        failure = f"free memory cannot be read ({error!r})"
    # A count is never negative: which side of zero it is on goes beside it.
    reports = _exchange(server, RankReport("room", failure=failure, retry=room < 0, nbytes=abs(room)))
    return min(-report.nbytes if report.retry else report.nbytes for report in reports)


def _steps_of(server: MeasuredServer, plan: _Plan) -> tuple[list[MeasuredStep], int, str]:
    """Kept or measured, the same on every rank; what a measurement took for good is free no more."""
    profile, shapes = None, steps_between(plan.work, plan.limit)
    if plan.store is not None and plan.key is not None:
        try:
            profile = plan.store.load(plan.key, shapes, server.device_bytes())
        except Exception as error:  # noqa: BLE001 - the other ranks are on their way to the exchange below
            why = error.what if isinstance(error, ProfileError) else f"{error!r}."
            logger.warning("kvarena: %s The steps are measured anew.", why)
    reports = _exchange(server, RankReport("profile", retry=profile is not None))
    if profile is not None and all(report.retry for report in reports):
        return profile.measured(), profile.unseen_bytes, "kept from an earlier start"
    steps, unseen = measure(server.runner, shapes, ranks=server.ranks, meter=server.measuring())
    if plan.store is not None and plan.key is not None:
        try:
            plan.store.save(Profile.of(plan.key, steps, unseen))
        except ProfileError as error:
            logger.warning("kvarena: %s", error)
    return steps, 0, "measured"


def _exchange(server: MeasuredServer, mine: RankReport) -> list[RankReport]:
    """Every rank's report.

    Raises
    ------
    MeasureError
        One of them failed; all raise it.
    """
    reports = list(server.ranks.exchange(mine))
    failures = [
        report.failure or f"a rank is at {report.stage!r}"
        for report in reports
        if report.failure or report.stage != mine.stage
    ]
    if failures:
        raise MeasureError("; ".join(dict.fromkeys(failures)) + ".")
    return reports
