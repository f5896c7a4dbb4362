"""What an engine is asked to copy, as arrays that nothing is wrong with before the engine sees them."""

from __future__ import annotations

from kvarena.transfer.errors import PageError, TransferFailed
from kvarena.transfer.pages.plan import page_ids
from kvarena.transfer.protocol import Addresses, Int64

__all__ = ["check_columns"]


def check_columns(
    engine: str, peer: str, src: Addresses, dst: Addresses, lengths: Addresses
) -> tuple[Int64, Int64, Int64]:
    """Sources, destinations and lengths as arrays of one length.

    Raises
    ------
    TransferFailed
        They are no integers, of different lengths, negative, or of bytes past 2**63.
    """
    try:
        columns = tuple(page_ids(column, "addresses and lengths").ravel() for column in (src, dst, lengths))
    except PageError as error:
        raise TransferFailed(engine, peer, None, str(error).rstrip(".")) from error
    sources, targets, counts = columns
    why = ""
    if not sources.size == targets.size == counts.size:
        why = f"{sources.size} sources, {targets.size} targets, {counts.size} lengths"
    elif any(int(column.min(initial=0)) < 0 for column in columns):
        why = "a negative address or length"
    elif any(int((column + counts).min(initial=0)) < 0 for column in (sources, targets)):
        why = "bytes past 2**63"
    if why:
        raise TransferFailed(engine, peer, None, why, operations=sources.size)
    return sources, targets, counts
