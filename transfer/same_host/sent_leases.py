"""What a sender knows of its receiver's leases: which pages may be written, and which have been."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import final

import numpy as np
import numpy.typing as npt
from kvarena.transfer._batch import PageLease
from kvarena.transfer.errors import LeaseError
from kvarena.transfer.pages.plan import leased_ids
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.intervals import highest

__all__ = ["LeaseKey", "LeasedPart", "SentLeases", "lease_digest"]

LeaseKey = tuple[str, int]
"""Request and serial."""

_WHOLE = "has been written whole"
# Leases that ended are remembered, so that nothing is written under them again.
_REMEMBERED = 1 << 16
# The names are the receiver's, and as long as it likes: so many characters of them are kept.
_REMEMBERED_CHARACTERS = 16 << 20
# Pages up to here are looked up in a map of that many bytes.
_BITMAP_PAGES = 1 << 18


def lease_digest(lease: PageLease) -> bytes:
    """16 bytes that stand for a lease where there is no room for its name."""
    return blake2b(b"%d:" % lease.serial + lease.request.encode(), digest_size=16).digest()


@final
class LeasedPart:
    """One sub-pool's pages of one lease, and how far they are written."""

    __slots__ = (
        "_bitmap",
        "_left",
        "_low",
        "_order",
        "_pages",
        "_raw",
        "_upto",
        "_written",
        "digest",
        "high",
        "index",
        "is_announced",
    )

    def __init__(self, lease: PageLease, sub_pool: str, digest: bytes) -> None:
        pages = leased_ids(lease.request, sub_pool, lease.pages[sub_pool])
        if pages.ndim != 1:
            raise LeaseError(lease.request, f"its pages of {sub_pool!r} are no list")
        self._pages = pages
        self._raw = pages.tobytes()
        # Pages before this one, in the lease's own order, are written: most senders keep that order.
        self._upto = 0
        self._left = pages.size
        self._low = int(pages.min(initial=0))
        self.high = int(pages.max(initial=0))
        """The highest page."""
        if self._low < 0:
            raise LeaseError(lease.request, f"page {self._low} of {sub_pool!r} does not exist")
        # Of pages that come in another order: a byte for each page up to the highest that tells whether
        # it may be written, or, where that would be large, the pages in order and whether each is written.
        self._bitmap: npt.NDArray[np.uint8] | None = None
        self._order: Int64 | None = None
        self._written: npt.NDArray[np.bool_] | None = None
        self.digest = digest
        self.index = sorted(lease.pages).index(sub_pool)
        """How a record names it."""
        self.is_announced = False
        """Whether the receiver knows by whom it will be written."""

    @property
    def is_written(self) -> bool:
        """Whether nothing is left to be written."""
        return self._left == 0

    def index_pages(self, request: str, sub_pool: str) -> None:
        """Make ready for pages in any order; raises `LeaseError` if the lease names one twice."""
        pages = self._pages
        if self._bitmap is not None or self._order is not None or not pages.size:
            return
        if self.high < _BITMAP_PAGES:
            bitmap = np.zeros(self.high + 1, np.uint8)
            bitmap[pages] = 1
            if int(np.count_nonzero(bitmap)) != pages.size:
                raise _leased_twice(request, sub_pool)
            self._bitmap = bitmap
        else:
            order = np.argsort(pages)
            if not (np.diff(pages[order]) > 0).all():
                raise _leased_twice(request, sub_pool)
            self._order = order
            self._written = np.zeros(pages.size, np.bool_)

    def take(self, request: str, sub_pool: str, pages: Int64) -> None:
        """Mark pages as being written; `LeaseError`, and none is marked, if one cannot be."""
        count, upto = pages.size, self._upto
        if upto == 0 and count == self._left:  # as nearly always: all of them, in the lease's order
            if pages.tobytes() == self._raw:
                self._upto, self._left = count, 0
                return
        elif upto >= 0 and self._raw[8 * upto : 8 * (upto + count)] == pages.tobytes():
            self._upto, self._left = upto + count, self._left - count
            return
        self._take_any(request, sub_pool, pages)
        self._left -= count

    def _take_any(self, request: str, sub_pool: str, pages: Int64) -> None:
        self.index_pages(request, sub_pool)
        if self._upto > 0:  # what was written in order was not marked
            if self._bitmap is not None:
                self._bitmap[self._pages[: self._upto]] = 0
            elif self._written is not None:
                self._written[: self._upto] = True
        if self._bitmap is not None:
            self._take_bits(self._bitmap, request, sub_pool, pages)
        else:
            self._take_sorted(request, sub_pool, pages)
        self._upto = -1  # no longer in order

    def _take_bits(self, bitmap: npt.NDArray[np.uint8], request: str, sub_pool: str, pages: Int64) -> None:
        if highest(pages) > self.high:
            raise _not_leased(request, sub_pool, pages[pages.view(np.uint64) > self.high])
        if not bitmap[pages].all():
            outside = pages[~np.isin(pages, self._pages)]
            if outside.size:
                raise _not_leased(request, sub_pool, outside)
            raise _written_twice(request, sub_pool)
        ordered = np.sort(pages)
        if (ordered[1:] == ordered[:-1]).any():
            raise _written_twice(request, sub_pool)
        bitmap[pages] = 0

    def _take_sorted(self, request: str, sub_pool: str, pages: Int64) -> None:
        if self._written is None or self._order is None:  # nothing is leased
            if pages.size:
                raise _not_leased(request, sub_pool, pages)
            return
        at = np.searchsorted(self._pages, pages, sorter=self._order)
        place = self._order[np.minimum(at, self._pages.size - 1)]
        outside = pages[self._pages[place] != pages]
        if outside.size:
            raise _not_leased(request, sub_pool, outside)
        after = self._written.copy()
        after[place] = True
        if int(after.sum() - self._written.sum()) != pages.size:
            raise _written_twice(request, sub_pool)
        self._written = after


def _not_leased(request: str, sub_pool: str, outside: Int64) -> LeaseError:
    return LeaseError(
        request, f"{outside.size} pages of {sub_pool!r} are not leased, page {int(outside[0])} first"
    )


def _leased_twice(request: str, sub_pool: str) -> LeaseError:
    return LeaseError(request, f"it names a page of {sub_pool!r} twice")


def _written_twice(request: str, sub_pool: str) -> LeaseError:
    return LeaseError(request, f"a page of {sub_pool!r} is written twice under it")


@final
class SentLeases:
    """Of one peer. The caller locks."""

    def __init__(self) -> None:
        self._open: dict[LeaseKey, dict[str, LeasedPart]] = {}
        self._ended: OrderedDict[LeaseKey, str] = OrderedDict()
        self._ended_characters = 0

    def admit(self, lease: PageLease) -> None:
        """Get to know a lease before its first page is written. Raises `LeaseError`."""
        key = (lease.request, lease.serial)
        if key not in self._ended and key not in self._open:
            parts = self._parts(lease)
            for name, part in parts.items():
                part.index_pages(lease.request, name)
                part.is_announced = True
            self._open[key] = parts

    def take(self, lease: PageLease, sub_pool: str, pages: Int64) -> LeasedPart:
        """Ask for these pages; raises `LeaseError`, and changes nothing, if they cannot be written.

        When they are under way, `taken` must be called.
        """
        key = (lease.request, lease.serial)
        parts = self._open.get(key)
        if parts is None:
            ended = self._ended.get(key)
            # A sub-pool of which nothing is leased may come after the last page of the others.
            if ended is not None and (pages.size or ended != _WHOLE):
                raise LeaseError(lease.request, f"lease {lease.serial} {ended}")
            parts = self._parts(lease)
        part = parts.get(sub_pool)
        if part is None:
            raise LeaseError(
                lease.request, f"nothing of sub-pool {sub_pool!r} is leased, only {sorted(parts)}"
            )
        part.take(lease.request, sub_pool, pages)
        if key not in self._ended:
            self._open[key] = parts
        return part

    def taken(self, lease: PageLease) -> None:
        """End a lease of which nothing is left to be written."""
        key = (lease.request, lease.serial)
        parts = self._open.get(key)
        if parts is not None and all(part.is_written for part in parts.values()):
            self._end(key, _WHOLE)

    def end(self, key: LeaseKey, why: str) -> None:
        """Nothing more may be written under it."""
        self._end(key, why)

    @staticmethod
    def _parts(lease: PageLease) -> dict[str, LeasedPart]:
        digest = lease_digest(lease)
        return {name: LeasedPart(lease, name, digest) for name in lease.pages}

    def _end(self, key: LeaseKey, why: str) -> None:
        self._open.pop(key, None)
        if key not in self._ended:
            self._ended_characters += len(key[0])
        self._ended[key] = why
        while len(self._ended) > _REMEMBERED or self._ended_characters > _REMEMBERED_CHARACTERS:
            oldest, _ = self._ended.popitem(last=False)
            self._ended_characters -= len(oldest[0])
