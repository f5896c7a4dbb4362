"""Changing the size of an arena under pages that are in use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kvarena.pool._pool_member import PoolMember
from kvarena.pool.errors import AllocatorError, PoolSizeError

__all__ = ["change_total_bytes"]


def change_total_bytes(members: Sequence[PoolMember], total_bytes: int, virtual_num_pages: int) -> int:
    """Let a chain of members use `total_bytes`, moving pages that would lie outside.

    Parameters
    ----------
    members : sequence of PoolMember
        In chain order; the first may grow up, the last down.
    total_bytes : int
        The new size of the arena; checked against its reservation by the caller.
    virtual_num_pages : int
        Virtual pages from now on.

    Returns
    -------
    int
        Pages moved.

    Raises
    ------
    AllocatorError
        Pages that would have to move are pinned.
    PoolSizeError
        The pages in use do not fit; the smallest size that holds them is named.
        In both cases nothing has changed.
    """
    ceilings = [total_bytes // member.page_bytes for member in members]
    for member, ceiling in zip(members, ceilings, strict=True):
        _require_no_pins_above(member, ceiling)
    minimum = _min_bytes(members)
    if total_bytes < minimum:
        raise PoolSizeError(
            f"{total_bytes} bytes do not hold the pages in use, which need {minimum}.",
            requested=total_bytes,
            minimum=minimum,
            maximum=members[0].pool.total_bytes,
            fix="Free or evict pages first, or shrink less.",
        )
    before = sum(member.moved_pages for member in members)
    # From the top down, each member says how far up the ones below it may reach.
    limit = total_bytes
    for member, ceiling in zip(reversed(members), reversed(ceilings), strict=True):
        if member.grows_up:
            member.retract_to(max(limit // member.page_bytes, member.min_page_index))
        else:
            extent = member._extent_after(ceiling)
            limit = limit if extent is None else extent.low
    for member, ceiling in zip(members, ceilings, strict=True):
        member._change_bounds(ceiling, virtual_num_pages)
    return sum(member.moved_pages for member in members) - before


def _require_no_pins_above(member: PoolMember, ceiling: int) -> None:
    if member._pins.high > ceiling:
        pinned = int(np.count_nonzero(member._pins.counts[ceiling:]))
        raise AllocatorError(
            f"{member.sub_pool_name!r}: {pinned} pages at or above page {ceiling}, the new end, are pinned.",
            fix="Wait for the transfers and unpin their pages first.",
        )


def _min_bytes(members: Sequence[PoolMember]) -> int:
    """The smallest arena that holds the pages in use, as tight as pins allow."""
    end = 0
    for member in members:
        extent = member.extent(0, packed=True)
        if extent is None:
            continue
        if member.grows_up:
            end = extent.high
        else:
            nbytes = member.page_bytes
            # Packed below a pinned page there may be gaps above it, which a lower end does not need.
            low = max(-(-end // nbytes), member.min_page_index)
            end = max(low + member._span.live, member._pins.high) * nbytes
    return end
