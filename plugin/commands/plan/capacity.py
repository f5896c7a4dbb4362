"""How many tokens and requests fit a number of bytes, as `kvarena.pool.budget` packs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvarena.plugin.commands.plan.errors import PlanError
from kvarena.plugin.commands.plan.ranks import RankGeometry, SubPool
from kvarena.pool.budget import PoolCost, SubPoolCost, packed_bytes, tokens_for_budget

__all__ = [
    "Capacity",
    "Split",
    "capacity",
    "fits",
    "floor_bytes",
    "max_slots",
    "requests_of",
    "smallest_bytes",
]

#: SGLang's defaults for --swa-full-tokens-ratio and --mamba-full-memory-ratio, 0.5.16 to 0.5.23.
SWA_FULL_TOKENS_RATIO = 0.8
MAMBA_FULL_MEMORY_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class Split:
    """How a pool is shared out between its kinds.

    Parameters
    ----------
    swa_full_tokens_ratio : float
        Window tokens for each full-attention token, above 0 and at most 1.
    running_requests : int or None
        Requests that keep a recurrent state. ``None`` lets `mamba_full_memory_ratio` decide.
    mamba_full_memory_ratio : float
        Bytes for states over bytes for tokens.
    """

    swa_full_tokens_ratio: float = SWA_FULL_TOKENS_RATIO
    running_requests: int | None = None
    mamba_full_memory_ratio: float = MAMBA_FULL_MEMORY_RATIO

    def __post_init__(self) -> None:
        if not 0 < self.swa_full_tokens_ratio <= 1:
            raise PlanError(
                f"swa_full_tokens_ratio is {self.swa_full_tokens_ratio}.", fix="Give one above 0 and up to 1."
            )
        if not 0 < self.mamba_full_memory_ratio < float("inf"):
            raise PlanError(
                f"mamba_full_memory_ratio is {self.mamba_full_memory_ratio}.", fix="Give one above 0."
            )
        if self.running_requests is not None and self.running_requests < 1:
            raise PlanError(f"running_requests is {self.running_requests}.", fix="Give at least 1.")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool of some bytes holds.

    Parameters
    ----------
    tokens : int or None
        Tokens of the full-attention sub-pool, or of the windows where no layer is full; ``None``
        for a model that keeps nothing per token.
    window_tokens : int or None
        Tokens of the window sub-pools.
    states : int or None
        Requests whose recurrent state fits.
    pool_bytes : int
        Bytes of the pool, its sink among them.
    """

    tokens: int | None
    window_tokens: int | None
    states: int | None
    pool_bytes: int

    @property
    def empty(self) -> bool:
        return self.tokens == 0 or self.states == 0


def smallest_bytes(rank: RankGeometry, slots: Mapping[str, int], page_size: int) -> int:
    """Bytes of the smallest pool on a rank that holds so many slots of each sub-pool, and the sink."""
    return packed_bytes(
        (
            pool.page_bytes(page_size),
            -(-slots.get(pool.name, 0) // (1 if pool.per_request else page_size)),
        )
        for pool in rank.sub_pools
    )


def fits(rank: RankGeometry, slots: Mapping[str, int], page_size: int, total_bytes: int) -> bool:
    """Whether a pool of `total_bytes` holds so many slots of each sub-pool."""
    return smallest_bytes(rank, slots, page_size) <= total_bytes


def floor_bytes(rank: RankGeometry, page_size: int, *, context_len: int | None = None) -> int:
    """Bytes of the smallest pool in which one request can be served (`RankGeometry.floor_terms`)."""
    return smallest_bytes(rank, dict(rank.floor_terms(page_size, context_len=context_len)), page_size)


def capacity(
    ranks: Sequence[RankGeometry], total_bytes: Sequence[int] | int, *, page_size: int, split: Split
) -> Capacity:
    """Tokens and states of a model over its pipeline stages.

    The fewest *tokens* decide, not the fewest bytes: stages differ in layers.

    Parameters
    ----------
    ranks : sequence of RankGeometry
        One rank of each stage.
    total_bytes : int or sequence of int
        Bytes of each stage's pool, its sink among them.
    page_size : int
        Tokens of a page.
    split : Split
        How kinds share.
    """
    totals = _per_stage(ranks, total_bytes)
    some_full = any(rank.get("full") is not None for rank in ranks)
    states = _states(ranks, totals, split)

    def window_ratio(pool: SubPool) -> float:
        return split.swa_full_tokens_ratio if some_full and pool.window is not None else 1

    def cost(rank: RankGeometry) -> PoolCost:
        return PoolCost(
            tuple(
                SubPoolCost(pool.name, pool.page_bytes(page_size), 1, 0, states or 0)
                if pool.per_request
                else SubPoolCost(pool.name, pool.page_bytes(page_size), page_size, window_ratio(pool))
                for pool in rank.sub_pools
            ),
            page_size,
        )

    found = []
    for rank, total in zip(ranks, totals, strict=True):
        if not rank.sub_pools:
            continue
        of_rank = cost(rank)
        if of_rank.total_bytes(0) > total:
            return Capacity(0 if _has_tokens(ranks) else None, None, 0, max(totals))
        if rank.token_pools:
            found.append(tokens_for_budget(of_rank, total))
    tokens = min(found, default=None)
    window = None
    if tokens is not None and any(pool.window is not None for rank in ranks for pool in rank.token_pools):
        window = tokens
        if some_full:
            window = int(tokens * split.swa_full_tokens_ratio) // page_size * page_size
    return Capacity(tokens, window, states, max(totals))


def max_slots(rank: RankGeometry, total_bytes: int, page_size: int) -> dict[str, int]:
    """Slots of each sub-pool when the others are empty: what a finalized pool calls its sides' sizes."""
    sink = rank.sink_bytes(page_size)
    found = {}
    for pool in rank.sub_pools:
        page = pool.page_bytes(page_size)
        pages = max(total_bytes // page - -(-sink // page), 0)
        found[pool.name] = pages if pool.per_request else pages * page_size
    return found


def requests_of(ranks: Sequence[RankGeometry], found: Capacity, context_len: int, *, page_size: int) -> int:
    """Requests of `context_len` tokens each that run side by side.

    Each keeps its context in full-attention layers, a window and a page of slack in the others, and one
    state. The kinds share by the split that `found` was made with, so what one has left over is not
    lent to another.

    Parameters
    ----------
    ranks : sequence of RankGeometry
        One rank of each stage.
    found : Capacity
        What their pools hold.
    context_len, page_size : int
        Tokens of a request, and of a page.
    """
    limits = []
    for rank in ranks:
        terms = dict(rank.floor_terms(page_size, context_len=context_len))
        for pool in rank.sub_pools:
            held = found.tokens if pool.window is None else found.window_tokens
            limits.append(((found.states if pool.per_request else held) or 0) // terms[pool.name])
    return min(limits, default=0)


def _per_stage(ranks: Sequence[RankGeometry], total_bytes: Sequence[int] | int) -> list[int]:
    return [total_bytes] * len(ranks) if isinstance(total_bytes, int) else list(total_bytes)


def _has_tokens(ranks: Sequence[RankGeometry]) -> bool:
    return any(rank.token_pools for rank in ranks)


def _states(ranks: Sequence[RankGeometry], totals: Sequence[int], split: Split) -> int | None:
    """States, which come off first; by memory ratio where the number of requests is not given."""
    found = []
    for rank, total in zip(ranks, totals, strict=True):
        pool = rank.state_pool
        if pool is None:
            continue
        # Without tokens to share with, all of it is for states. One entry is the sink.
        ratio = split.mamba_full_memory_ratio
        share = ratio / (1 + ratio) if _has_tokens(ranks) else 1.0
        found.append(max(int(total * share) // pool.entry_bytes - 1, 0))
    if not found:
        return None
    return min(found) if split.running_requests is None else split.running_requests
