"""What one request moves from a prefill server to a decode server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvarena.plugin.commands.plan.ranks import RankGeometry

__all__ = ["Moved", "moved_bytes"]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one request between the two sides of a PD pair.

    Parameters
    ----------
    tokens : int
        Tokens of the request's prompt.
    per_card : tuple of int
        Bytes that a card of each stage sends.
    total : int
        Bytes of all cards.
    bandwidth : int or None
        Bytes a second of one card's link.
    """

    tokens: int
    per_card: tuple[int, ...]
    total: int
    bandwidth: int | None = None

    @property
    def seconds(self) -> float | None:
        """How long the fullest card takes, all cards sending at once; ``None`` without a bandwidth."""
        return max(self.per_card, default=0) / self.bandwidth if self.bandwidth else None


def moved_bytes(
    ranks: Sequence[RankGeometry], tokens: int, *, page_size: int, tp: int, bandwidth: int | None = None
) -> Moved:
    """Whole pages of every token in full attention, of the window's tokens in the others, and one state.

    Parameters
    ----------
    ranks : sequence of RankGeometry
        One rank of each stage.
    tokens, page_size : int
        Tokens of the prompt, and of a page.
    tp : int
        Ranks of a stage that serve this request.
    bandwidth : int, optional
        Bytes a second of one card's link.
    """
    per_card = []
    for rank in ranks:
        nbytes = 0
        for pool in rank.sub_pools:
            kept = tokens if pool.window is None else min(tokens, pool.window)
            slots = 1 if pool.per_request else -(-kept // page_size) * page_size
            nbytes += slots * pool.entry_bytes
        per_card.append(nbytes)
    return Moved(tokens, tuple(per_card), sum(per_card) * tp, bandwidth)
