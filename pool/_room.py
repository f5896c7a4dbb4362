"""Where the sub-pools of one arena end, and how they make room for each other.

Members stand in chain order, from the arena's low end up. Each says which
bytes its span would cover (`Member.extent`); two neighbours fit when their
extents do not overlap. A member without pages covers nothing and is passed
over, so it never walls off free bytes. The ends are the members that exist
today; a float between them only has to answer the same questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

__all__ = ["Extent", "Member", "fits", "make_room"]


class Extent(NamedTuple):
    """Bytes from the arena's start."""

    low: int
    high: int


class Member(Protocol):
    """A sub-pool's part in the chain."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page envelope."""
        ...

    @property
    def grows_up(self) -> bool:
        """Whether the frontier is the high edge."""
        ...

    def extent(self, extra: int, *, packed: bool) -> Extent | None:
        """Bytes covered with `extra` pages more; `packed`: after compaction, as tight as pins allow.

        None: no page at all.
        """
        ...

    def within_bounds(self, extra: int) -> bool:
        """Whether `extra` pages more fit between this member's own bounds, neighbours aside."""
        ...

    def retract_to(self, edge: int) -> int:
        """Move pages so that the frontier comes to page `edge` or behind it; pages moved."""
        ...


def fits(members: Sequence[Member], extra: Sequence[int], *, packed: bool) -> bool:
    """Whether every member can take `extra` pages more, without or with compaction."""
    below = 0
    for member, count in zip(members, extra, strict=True):
        if not member.within_bounds(count):
            return False
        extent = member.extent(count, packed=packed)
        if extent is not None:
            if extent.low < below:
                return False
            below = extent.high
    return True


def make_room(members: Sequence[Member], extra: Sequence[int]) -> bool:
    """Compact as little as needed so that every member can take `extra` pages more.

    Returns
    -------
    bool
        False: it does not fit even packed, and nothing was moved.
    """
    if fits(members, extra, packed=False):
        return True
    if not fits(members, extra, packed=True):
        return False
    # What does not overlap after this pass of neighbours overlapped before it only by holes.
    occupied = [(m, n) for m, n in zip(members, extra, strict=True) if m.extent(n, packed=True) is not None]
    for (lower, lower_extra), (upper, upper_extra) in pairwise(occupied):
        _part(lower, lower_extra, upper, upper_extra)
    return True


def _part(lower: Member, lower_extra: int, upper: Member, upper_extra: int) -> None:
    """Let two facing frontiers come apart; packed, they are known to fit."""
    loose_low, loose_high = lower.extent(lower_extra, packed=False), upper.extent(upper_extra, packed=False)
    tight_low = lower.extent(lower_extra, packed=True)
    assert loose_low is not None
    assert loose_high is not None
    assert tight_low is not None
    if loose_low.high <= loose_high.low:
        return
    # As far as the upper one stands now, or, if pages are in the way, as tight as can be.
    edge = max(tight_low.high // lower.page_bytes, loose_high.low // lower.page_bytes)
    lower.retract_to(edge)
    below = edge * lower.page_bytes
    if below > loose_high.low:
        upper.retract_to(-(-below // upper.page_bytes))
