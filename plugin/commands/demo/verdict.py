"""Whether a demo run was right: tokens, invariants, capacities, leaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from kvarena.plugin.commands.demo.growth import GrowthDriver, GrowthReport
from kvarena.plugin.commands.demo.hosts import HostsReport, TwoHosts
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.plugin.engines.embedded.worker import ROLES

__all__ = ["DemoReport", "Findings", "RequestReport", "judge"]


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
    min_margin: float | None
    """Of all steps. Far above `largest_noise`, or equal tokens would be luck."""
    largest_noise: float | None
    """The largest difference between the pair's and the reference's logit of one token."""
    processes: dict[str, dict[str, Any]]
    """Each worker's last report: timeline, capacities, bytes."""
    seconds: float
    growth: GrowthReport | None = None
    """Only of a run in which the pools grew."""
    hosts: HostsReport | None = None
    """Only of a run on two hosts."""


@dataclass(frozen=True)
class Findings:
    """All that is known of a run when it has ended."""

    requests: list[Request]
    served: dict[int, Result]
    """The pair's answers."""
    reference: dict[int, Result]
    """The single process's."""
    started: dict[Any, dict[str, Any]]
    """What each role's worker reported when it was ready."""
    ended: dict[Any, dict[str, Any]]
    """What it reported at its end."""
    eager: dict[int, dict[str, int]]
    """What eager pools of these sizes expose."""
    failures: list[str]
    """What went wrong with the processes themselves."""
    repeats: dict[int, int] = field(default_factory=dict)
    """Requests that were served again: their id, and that of the first time."""
    growth: GrowthDriver | None = None
    hosts: TwoHosts | None = None


def judge(found: Findings, *, seconds: float) -> DemoReport:
    """Compare, and collect everything that is not as it must be."""
    served, reference = found.served, found.reference
    problems = list(found.failures)
    reports = [_compare(request, served, reference) for request in found.requests]
    problems += [f"request {report.rid}: {report.error}" for report in reports if report.error]
    if reference:
        problems += [
            f"request {report.rid}: the pair's tokens differ from the single process's"
            for report in reports
            if not report.equal and not report.error
        ]
        problems += _unlike_the_first_time(found)
    for when, side in (("at its start", found.started), ("at its end", found.ended)):
        for role, pool in side.items():
            problems += [f"{role}, {when}: {problem}" for problem in pool.get("problems", [])]
    if not found.failures:
        for role in ("prefill", "decode"):
            for side in (found.started, found.ended):
                problems += _unlike_eager(role, side.get(role, {}).get("capacities", {}), found.eager)
    growth = None
    if found.growth is not None:
        growth = found.growth.report(served_again=len(found.repeats), ended=found.ended)
        problems += found.growth.problems
        if growth.failed_transfers and found.hosts is None:
            problems.append(f"{growth.failed_transfers} transfers failed while the pools grew and gave back")
    hosts = None
    if found.hosts is not None:
        hosts = found.hosts.report(resent=found.ended.get("prefill", {}).get("resent", 0))
    last = {role: found.ended.get(role) or found.started.get(role) for role in ROLES}
    margins = [report.margin for report in reports if report.margin is not None]
    noise = [
        abs(a - b)
        for rid, result in served.items()
        if rid in reference and reference[rid].tokens == result.tokens
        for a, b in zip(result.logits, reference[rid].logits, strict=True)
    ]
    return DemoReport(
        ok=not problems,
        problems=list(dict.fromkeys(problems)),
        requests=reports,
        min_margin=min(margins, default=None),
        largest_noise=max(noise, default=None),
        processes={str(role): pool for role, pool in last.items() if pool},
        seconds=seconds,
        growth=growth,
        hosts=hosts,
    )


def _unlike_the_first_time(found: Findings) -> list[str]:
    """Requests that were served again, and got another answer than the single process gives."""
    problems = []
    for rid, first in found.repeats.items():
        result, expected = found.served.get(rid), found.reference.get(first)
        if result is None or result.error:
            problems.append(f"request {first}, served again as {rid}: {result and result.error}")
        elif expected is not None and result.tokens != expected.tokens:
            problems.append(f"request {first}, served again as {rid}: its tokens differ")
    return problems


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
