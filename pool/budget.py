"""How pages of several sub-pools pack into an arena, and how many tokens a budget of bytes pays for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

from kvarena.pool.errors import LayoutError

__all__ = ["PoolCost", "SubPoolCost", "largest_count", "packed_bytes", "tokens_for_budget"]


def packed_bytes(chain: Iterable[tuple[int, int]]) -> int:
    """Bytes of the smallest pool that holds so many pages of each sub-pool, the sink included.

    The sink is the largest page envelope: page 0 of every sub-pool. Sub-pools count their pages from
    byte 0, so each run of pages starts at the next multiple of its own envelope above the sink and
    its lower neighbour. It is exact: in one byte less, what grows up and what grows down overlap.

    Parameters
    ----------
    chain : iterable of (int, int)
        Bytes of a page envelope, and pages besides the sink's, of each sub-pool, in the order of
        `chain_order`. A sub-pool without pages takes nothing but its share of the sink.
    """
    pages = list(chain)
    end = max((page_bytes for page_bytes, _ in pages), default=0)
    for page_bytes, count in pages:
        if count:
            end = (-(-end // page_bytes) + count) * page_bytes
    return end


def largest_count(fits: Callable[[int], bool], maximum: int) -> int:
    """The largest count up to `maximum` that fits, found by bisection; 0 where not even 1 does.

    Parameters
    ----------
    fits : callable
        Whether a count fits; where one does, all smaller ones must.
    maximum : int
        No larger count is tried.
    """
    low, high = 0, 1
    while high <= maximum and fits(high):
        low, high = high, high * 2
    high = min(high, maximum + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@final
@dataclass(frozen=True)
class SubPoolCost:
    """How one sub-pool grows with the tokens of the pool.

    Parameters
    ----------
    name : str
        The sub-pool.
    page_bytes : int
        Bytes of one page envelope.
    slots_per_page : int
        Tokens a page; 1 for states.
    ratio : float
        Slots for each token of the pool: SGLang's ``swa_full_tokens_ratio`` for a window, 0 for states.
    fixed_slots : int
        Slots whatever the tokens: states, one for each running request.
    """

    name: str
    page_bytes: int
    slots_per_page: int = 1
    ratio: float = 1
    fixed_slots: int = 0

    def pages(self, tokens: int) -> int:
        """Pages for a pool of `tokens` tokens, the sink's not among them.

        A share of the tokens is rounded down to whole pages, as SGLang does (``_solve_pool_sizes``,
        0.5.23); whole tokens and fixed slots are rounded up.
        """
        whole = -(-tokens // self.slots_per_page) * self.slots_per_page
        shared = int(whole * self.ratio) // self.slots_per_page
        return shared - (-self.fixed_slots // self.slots_per_page)


@final
@dataclass(frozen=True)
class PoolCost:
    """Bytes of a pool as a function of its tokens, which never falls.

    Parameters
    ----------
    chain : tuple of SubPoolCost
        In chain order, as they lie in the arena.
    page_size : int
        Tokens are counted in whole pages of this size.

    Raises
    ------
    LayoutError
        There is no sub-pool.
    """

    chain: tuple[SubPoolCost, ...]
    page_size: int = 1

    def __post_init__(self) -> None:
        if not self.chain:
            raise LayoutError("A pool without sub-pools cannot be sized.", fix="Give at least one.")

    @property
    def sink_bytes(self) -> int:
        """The largest envelope: page 0 of every sub-pool."""
        return max(sub_pool.page_bytes for sub_pool in self.chain)

    def total_bytes(self, tokens: int) -> int:
        """Bytes of the smallest pool that holds `tokens` tokens, the sink included (`packed_bytes`)."""
        return packed_bytes((sub_pool.page_bytes, sub_pool.pages(tokens)) for sub_pool in self.chain)


def tokens_for_budget(cost: PoolCost, total_bytes: int, *, granularity: int = 1) -> int:
    """The most tokens, in whole pages, of a pool that takes no more than `total_bytes` of memory.

    Parameters
    ----------
    cost : PoolCost
        What tokens cost on this rank.
    total_bytes : int
        Memory for the whole pool: its sink, its states and its tokens.
    granularity : int
        The pool is backed in multiples of this many bytes (2 MiB on CUDA), and the last granule counts
        whole.

    Returns
    -------
    int
        Tokens, a multiple of the page size; 0 where not even one page fits, or nothing grows with tokens.
    """
    if not any(sub_pool.ratio for sub_pool in cost.chain):
        return 0
    usable = total_bytes // granularity * granularity

    def fits(pages: int) -> bool:
        return cost.total_bytes(pages * cost.page_size) <= usable

    # Every page takes at least a byte, but a small ratio shares one among many tokens.
    smallest = min(sub_pool.ratio for sub_pool in cost.chain if sub_pool.ratio)
    return largest_count(fits, int((max(total_bytes, 0) + 1) / smallest) + 1) * cost.page_size
