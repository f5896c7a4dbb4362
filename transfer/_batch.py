"""What an engine is asked to copy: one record of a batch, and arrays that are checked before it sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy.typing as npt
from kvarena.transfer.errors import PageError, TransferFailed
from kvarena.transfer.pages.plan import page_ids
from kvarena.transfer.protocol import Addresses, Int64

__all__ = ["PageBatch", "PageLease", "check_columns"]


class PageLease(Protocol):
    """`kvarena.transfer.Lease`, as far as engines read it."""

    @property
    def request(self) -> str:
        """The request that the pages were granted to."""
        ...

    @property
    def serial(self) -> int:
        """Which lease of that request."""
        ...

    @property
    def pages(self) -> Mapping[str, Sequence[int]]:
        """Sub-pool name to page ids."""
        ...


class PageBatch(NamedTuple):
    """Pages of one sub-pool that are written under one lease: what `submit_pages` takes."""

    src: npt.ArrayLike
    """Page ids here, integers of shape (n,)."""
    dst: npt.ArrayLike
    """Page ids of the receiver, of the same shape; each is leased."""
    page_bytes: int
    """Bytes of a page envelope."""
    lease: PageLease
    """From the receiver, as it came with the request."""
    sub_pool: str = "full"
    """Which of the lease's page lists `dst` is from."""
    src_base: int | None = None
    """Address of page 0 here; None: the arena's first byte, where every sub-pool of a unified pool starts."""
    dst_base: int | None = None
    """Address of page 0 in the receiver's process; None: its arena's first byte."""
    after: int | None = None
    """A CUDA stream whose work so far must be done before the sources are read."""


def check_columns(
    engine: str, peer: str, src: Addresses, dst: Addresses, lengths: Addresses
) -> tuple[Int64, Int64, Int64]:
    """Sources, destinations and lengths as arrays of one length.

    Raises
    ------
    TransferFailed
        They are not integers, of different lengths, negative, or of bytes past 2**63.
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
