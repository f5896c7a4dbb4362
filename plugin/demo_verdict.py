"""Whether a demo run was right: tokens, invariants, capacities, leaks."""

from __future__ import annotations

from typing import Any

import msgspec
from kvarena.plugin.engines.embedded.requests import Request, Result

__all__ = ["DemoReport", "RequestReport", "judge"]


class RequestReport(msgspec.Struct, frozen=True):
    """One request, as the pair and the reference answered it."""

    rid: int
    prompt_tokens: int
    tokens: list[int]
    reason: str
    equal: bool
    error: str
    margin: float | None
    """The least distance between the two highest logits, over its steps."""


class DemoReport(msgspec.Struct, frozen=True):
    """All that a run found; its JSON is the demo's ``--json``."""

    ok: bool
    problems: list[str]
    """What is wrong, one sentence each; empty when `ok`."""
    requests: list[RequestReport]
    least_margin: float | None
    """Of all steps. Far above `largest_noise`, or equal tokens would be luck."""
    largest_noise: float | None
    """The largest difference between the pair's and the reference's logit of one token."""
    processes: dict[str, dict[str, Any]]
    """Each worker's last report: timeline, capacities, bytes."""
    seconds: float


def judge(
    *,
    requests: list[Request],
    served: dict[int, Result],
    reference: dict[int, Result],
    started: dict[Any, dict[str, Any]],
    ended: dict[Any, dict[str, Any]],
    eager: dict[int, dict[str, int]],
    failures: list[str],
    seconds: float,
) -> DemoReport:
    """Compare, and collect everything that is not as it must be.

    Parameters
    ----------
    served, reference : dict of int to Result
        The pair's and the reference's answers.
    started, ended : dict of role to report
        What each worker reported when it was ready, and at its end.
    eager : dict of int to capacities
        What eager pools of these sizes expose.
    failures : list of str
        What went wrong with the processes themselves.
    """
    problems = list(failures)
    reports = [_compare(request, served, reference) for request in requests]
    problems += [f"request {report.rid}: {report.error}" for report in reports if report.error]
    if reference:
        problems += [
            f"request {report.rid}: the pair's tokens differ from the single process's"
            for report in reports
            if not report.equal and not report.error
        ]
    for when, side in (("at its start", started), ("at its end", ended)):
        for role, pool in side.items():
            problems += [f"{role}, {when}: {problem}" for problem in pool.get("problems", [])]
    if not failures:
        for role in ("prefill", "decode"):
            problems += _unlike_eager(role, started.get(role, {}).get("capacities", {}), eager)
    margins = [report.margin for report in reports if report.margin is not None]
    noise = [
        abs(a - b)
        for rid, result in served.items()
        if rid in reference and reference[rid].tokens == result.tokens
        for a, b in zip(result.logits, reference[rid].logits, strict=True)
    ]
    return DemoReport(
        ok=not problems,
        problems=problems,
        requests=reports,
        least_margin=min(margins, default=None),
        largest_noise=max(noise, default=None),
        processes={str(role): ended.get(role) or pool for role, pool in started.items() if pool}
        | {str(role): pool for role, pool in ended.items() if pool},
        seconds=seconds,
    )


def _compare(request: Request, served: dict[int, Result], reference: dict[int, Result]) -> RequestReport:
    result = served.get(request.rid) or Result(request.rid, [], "error", error="it was not answered")
    other = reference.get(request.rid)
    return RequestReport(
        rid=request.rid,
        prompt_tokens=len(request.tokens),
        tokens=result.tokens,
        reason=result.reason,
        equal=other is not None and result.tokens == other.tokens and result.reason == other.reason,
        error=result.error or (f"the reference failed: {other.error}" if other and other.error else ""),
        margin=result.margin,
    )


def _unlike_eager(role: str, capacities: dict[str, int], eager: dict[int, dict[str, int]]) -> list[str]:
    """Invariant 4: a finalized pool equals an eager pool of that size."""
    expected = eager.get(capacities.get("total_bytes", -1))
    if expected is None:
        return [f"{role}: its capacities were not compared with an eager pool's"]
    return [
        f"{role}: {name} is {capacities.get(name)}, of an eager pool of that size {value}"
        for name, value in expected.items()
        if capacities.get(name) != value
    ]
