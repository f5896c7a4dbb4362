"""How many tokens a budget of bytes pays for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, final

from kvarena.pool.errors import LayoutError, PoolSizeError

if TYPE_CHECKING:
    from kvarena.pool.layout import SubPoolSpec

__all__ = ["PoolCost", "SubPoolCost", "tokens_for_budget"]


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
    ratio : Fraction or float
        Slots for each token of the pool; for a window less than 1, when it
        is shared out in proportion.
    most_slots : int, optional
        Slots that are never exceeded: for a window, what all running requests
        can see.
    fixed_slots : int
        Slots whatever the tokens: states, one for each running request.
    """

    name: str
    page_bytes: int
    slots_per_page: int = 1
    ratio: Fraction | float = 1
    max_slots: int | None = None
    fixed_slots: int = 0

    def pages(self, tokens: int) -> int:
        """Pages for a pool of `tokens` tokens, the sink's not among them."""
        slots = -int(-tokens * Fraction(self.ratio) // 1)
        if self.max_slots is not None:
            slots = min(slots, self.max_slots)
        return -(-(slots + self.fixed_slots) // self.slots_per_page)


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
    """

    chain: tuple[SubPoolCost, ...]
    page_size: int = 1

    def __post_init__(self) -> None:
        if not self.chain:
            raise LayoutError("A pool without sub-pools cannot be sized.", fix="Give at least one.")

    @classmethod
    def of(
        cls,
        specs: Sequence[SubPoolSpec],
        page_size: int,
        *,
        ratios: Mapping[str, Fraction | float] | None = None,
        max_slots: Mapping[str, int] | None = None,
        fixed_slots: Mapping[str, int] | None = None,
    ) -> PoolCost:
        """From layouts; a sub-pool named in `fixed_slots` but not in `ratios` holds states only.

        Parameters
        ----------
        specs : sequence of SubPoolSpec
            The sub-pools.
        page_size : int
            Tokens a page.
        ratios, most_slots, fixed_slots : mapping, optional
            By sub-pool name; see `SubPoolCost`.
        """
        from kvarena.pool.layout import chain_order

        ratios, max_slots, fixed_slots = ratios or {}, max_slots or {}, fixed_slots or {}
        return cls(
            tuple(
                SubPoolCost(
                    spec.name,
                    spec.page_envelope_bytes(page_size),
                    spec.slots_per_page(page_size),
                    ratios.get(spec.name, 0 if spec.name in fixed_slots else 1),
                    max_slots.get(spec.name),
                    fixed_slots.get(spec.name, 0),
                )
                for spec in chain_order(specs)
            ),
            page_size,
        )

    @property
    def sink_bytes(self) -> int:
        """The largest envelope: page 0 of every sub-pool."""
        return max(sub_pool.page_bytes for sub_pool in self.chain)

    def total_bytes(self, tokens: int, min_slots: Mapping[str, int] | None = None) -> int:
        """Bytes of the smallest pool that holds `tokens` tokens, the sink included.

        Each sub-pool's pages begin at a multiple of its own envelope, so the
        bytes between two of them are counted too.

        Parameters
        ----------
        tokens : int
            Tokens.
        least_slots : mapping of str to int, optional
            Slots of a sub-pool that are counted even if `tokens` needs fewer.
        """
        end = self.sink_bytes
        for sub_pool in self.chain:
            slots = (min_slots or {}).get(sub_pool.name, 0)
            pages = max(sub_pool.pages(tokens), -(-slots // sub_pool.slots_per_page))
            end = (-(-end // sub_pool.page_bytes) + pages) * sub_pool.page_bytes
        return end

    def budget_bytes(self, tokens: int, min_slots: Mapping[str, int] | None = None) -> int:
        """`total_bytes` without the sink, which is backed already when free memory is measured."""
        return self.total_bytes(tokens, min_slots) - self.sink_bytes


def tokens_for_budget(
    cost: PoolCost,
    budget_bytes: int,
    *,
    floor_tokens: int = 1,
    floor_slots: Mapping[str, int] | None = None,
    cap_tokens: int | None = None,
) -> int:
    """The most tokens, in whole pages, that a budget pays for; found by bisection over pages.

    Parameters
    ----------
    cost : PoolCost
        What tokens cost on this rank.
    budget_bytes : int
        Bytes beyond the sink.
    floor_tokens : int
        Tokens that one request needs.
    floor_slots : mapping of str to int, optional
        Slots of single sub-pools that one request needs (a window's tail, a state).
    cap_tokens : int, optional
        Never more than this; None: what fits.

    Returns
    -------
    int
        Tokens; a multiple of the page size.

    Raises
    ------
    PoolSizeError
        One request does not fit. Its `least` is the least budget that works, and
        the text names it.
    """
    page = cost.page_size
    floor_pages = max(1, -(-floor_tokens // page))
    minimum = cost.budget_bytes(floor_pages * page, floor_slots)
    if budget_bytes < minimum or (cap_tokens is not None and cap_tokens // page < floor_pages):
        raise PoolSizeError(
            f"A budget of {budget_bytes} bytes"
            + (f" and of {cap_tokens} tokens" if cap_tokens is not None else "")
            + f" is too small: one request needs {floor_pages * page} tokens, which take {minimum} bytes.",
            requested=budget_bytes,
            minimum=minimum,
            maximum=max(minimum, budget_bytes),
            fix=f"Give the pool at least {minimum} bytes beside its sink of {cost.sink_bytes}, or lower the "
            "context length.",
        )
    if cap_tokens is None and cost.budget_bytes(page << 62) <= budget_bytes:
        raise PoolSizeError(
            f"Any number of tokens fits into {budget_bytes} bytes, for no sub-pool grows with them.",
            requested=budget_bytes,
            minimum=minimum,
            maximum=max(minimum, budget_bytes),
            fix="Give cap_tokens.",
        )
    fits, too_many = floor_pages, floor_pages + 1
    while cost.budget_bytes(too_many * page) <= budget_bytes:
        fits, too_many = too_many, too_many * 2
        if cap_tokens is not None and fits * page >= cap_tokens:
            return cap_tokens // page * page
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if cost.budget_bytes(middle * page) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    tokens = fits * page
    return tokens if cap_tokens is None else min(tokens, cap_tokens // page * page)
