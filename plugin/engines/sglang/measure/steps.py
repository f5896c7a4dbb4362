"""Which steps of a server can take most memory, by its role and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

__all__ = ["DECODE", "StepShape", "Workload", "fixed_steps", "steps_at", "steps_between"]

#: The decode step that no graph covers.
DECODE = "decode"

#: New tokens behind a cached prefix that no graph takes: the smallest prefill graph holds four (facts §0.5).
_FEW_TOKENS = 4

Kind = Literal["extend", "decode", "sample"]


@final
@dataclass(frozen=True)
class StepShape:
    """One step to run.

    Attributes
    ----------
    name : str
        In log lines and kept profiles.
    kind : str
        ``"extend"``, ``"decode"`` or ``"sample"``.
    batch : int
        Requests in the step.
    tokens : int
        New tokens of each request.
    prefix : int
        Tokens that each request has in the cache already.
    longest : int
        Length of the first request, where it is longer than the others.
    requests : int
        The limit of running requests that the step stands for; 0: it does not depend on it.
    """

    name: str
    kind: Kind
    batch: int
    tokens: int = 1
    prefix: int = 0
    longest: int = 0
    requests: int = 0


@final
@dataclass(frozen=True)
class Workload:
    """What a server may be asked to do.

    Attributes
    ----------
    role : str
        SGLang's ``disaggregation_mode``: ``"null"``, ``"prefill"`` or ``"decode"``.
    limit : int
        Running requests.
    graph_requests : int
        The largest batch that decode graphs cover; 0: there are none.
    chunk : int
        Tokens of the largest prefill.
    context : int
        The longest request.
    pool_tokens : int
        Tokens that all requests have together at most.
    mla : bool
        Whether a cached prefix is written out as K and V.
    prefix_capacity : int
        MLA: tokens that are written out at once.
    """

    role: str
    limit: int
    graph_requests: int
    chunk: int
    context: int
    pool_tokens: int
    mla: bool = False
    prefix_capacity: int = 0

    @property
    def min_limit(self) -> int:
        """As many as the limit may go down to: below the graphs' largest batch nothing is gained."""
        return min(self.limit, self.graph_requests or 1)


def fixed_steps(work: Workload) -> tuple[StepShape, ...]:
    """Steps that do not depend on the limit of running requests."""
    if work.role == "decode":
        return ()
    chunk = min(work.chunk, work.context)
    found = [StepShape("prefill", "extend", max(1, work.chunk // chunk), chunk)]
    behind = work.context - chunk
    if behind > 0:
        found.append(StepShape("prefill behind a prefix", "extend", 1, chunk, behind))
    if work.mla:
        each = min(work.prefix_capacity, work.context)
        prefix = max(0, each - _FEW_TOKENS)
        found.append(
            StepShape(
                "few tokens behind a prefix",
                "extend",
                max(1, work.prefix_capacity // each),
                _FEW_TOKENS,
                prefix,
            )
        )
    return tuple(found)


def steps_at(work: Workload, requests: int) -> tuple[StepShape, ...]:
    """Steps that as many running requests can bring about."""
    found = []
    if work.role != "decode":
        # As many short prompts as one chunk holds: each has a row of logits.
        batch = min(requests, work.chunk)
        found.append(
            StepShape("prefill of many", "extend", batch, max(1, work.chunk // batch), requests=requests)
        )
    if work.role != "prefill" and requests > work.graph_requests:
        each = max(1, min(work.context, work.pool_tokens // requests) - 1)
        found.append(
            StepShape(DECODE, "decode", requests, 1, each, longest=work.context - 1, requests=requests)
        )
    rows = min(requests, work.chunk) if work.role == "prefill" else requests
    found.append(StepShape("sampling with top-p", "sample", rows, requests=requests))
    return tuple(found)


def steps_between(work: Workload, limit: int) -> tuple[StepShape, ...]:
    """Every step for limits between what graphs cover and `limit`.

    A decode step starts to take memory at the first number of requests that no graph covers, so that it is
    measured there, too: below, it takes none.
    """
    fewest = min(limit, work.min_limit)
    found = [*fixed_steps(work), *steps_at(work, fewest)]
    if limit > fewest:
        found += [step for step in steps_at(work, fewest + 1) if step.name == DECODE and limit > fewest + 1]
        found += steps_at(work, limit)
    return tuple(found)
