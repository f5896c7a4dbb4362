"""What a sender knows of its receiver's leases: which pages may be written, and which have been."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol, final

import numpy as np
import numpy.typing as npt
from kvarena.transfer._copy import Int64
from kvarena.transfer._same_host_wire import Kind, opened
from kvarena.transfer.errors import LeaseError

__all__ = ["LeaseKey", "LeasedPart", "PageLease", "SentLeases"]

LeaseKey = tuple[str, int]
"""Request and serial."""

# Leases that ended are remembered, so that nothing is written under them again.
_REMEMBERED = 1 << 16


class PageLease(Protocol):
    """`kvarena.transfer.Lease`, as far as it is read here."""

    @property
    def request(self) -> str:
        """Whose pages."""
        ...

    @property
    def serial(self) -> int:
        """Which lease of that request."""
        ...

    @property
    def pages(self) -> Mapping[str, Sequence[int]]:
        """Sub-pool name to page ids."""
        ...


@final
class LeasedPart:
    """One sub-pool's pages of one lease, and how far they are written."""

    __slots__ = ("_left", "_order", "_pages", "_raw", "_upto", "_written", "high", "report")

    def __init__(self, lease: PageLease, sub_pool: str) -> None:
        ids = lease.pages[sub_pool]
        self._pages = np.fromiter(ids, np.int64, len(ids))
        self._raw = self._pages.tobytes()
        # Pages before this one, in the lease's own order, are written: most senders keep that order.
        self._upto = 0
        self._left = len(ids)
        self._order: Int64 | None = None
        self._written: npt.NDArray[np.bool_] | None = None
        self.high = int(self._pages.max(initial=0))
        """The highest page."""
        self.report = opened(
            Kind.DONE, {"request": lease.request, "serial": lease.serial, "sub_pool": sub_pool}
        )
        """How a report of written pages begins; made once, as reports are on the way of every transfer."""

    @property
    def is_written(self) -> bool:
        """Whether nothing is left to be written."""
        return self._left == 0

    def take(self, request: str, sub_pool: str, pages: Int64) -> None:
        """Mark pages as being written; `LeaseError`, and none is marked, if one cannot be."""
        count = pages.size
        if self._written is None and self._raw[8 * self._upto : 8 * (self._upto + count)] == pages.tobytes():
            self._upto += count
            self._left -= count
            return
        if self._written is None or self._order is None:
            self._order = np.argsort(self._pages)
            self._written = np.zeros(self._pages.size, np.bool_)
            self._written[: self._upto] = True
        if self._pages.size:
            at = np.searchsorted(self._pages, pages, sorter=self._order)
            place = self._order[np.minimum(at, self._pages.size - 1)]
            outside = pages[self._pages[place] != pages]
        else:
            place, outside = pages, pages
        if outside.size:
            raise LeaseError(
                request, f"{outside.size} pages of {sub_pool!r} are not leased, page {int(outside[0])} first"
            )
        after = self._written.copy()
        after[place] = True
        if int(after.sum() - self._written.sum()) != count:
            raise LeaseError(request, f"a page of {sub_pool!r} is written twice under it")
        self._written = after
        self._left -= count


@final
class SentLeases:
    """Of one peer; thread-safe, with a lock of its own that nothing else is taken under."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[LeaseKey, dict[str, LeasedPart]] = {}
        self._ended: OrderedDict[LeaseKey, str] = OrderedDict()

    def admit(self, lease: PageLease) -> None:
        """Get to know a lease before its first page is written."""
        key = (lease.request, lease.serial)
        with self._lock:
            if key not in self._ended and key not in self._open:
                self._open[key] = {name: LeasedPart(lease, name) for name in lease.pages}

    def take(self, lease: PageLease, sub_pool: str, pages: Int64) -> LeasedPart:
        """Ask for these pages; raises `LeaseError`, and changes nothing, if they cannot be written."""
        key = (lease.request, lease.serial)
        with self._lock:
            if key in self._ended:
                raise LeaseError(lease.request, f"lease {lease.serial} {self._ended[key]}")
            parts = self._open.get(key)
            if parts is None:
                parts = {name: LeasedPart(lease, name) for name in lease.pages}
            part = parts.get(sub_pool)
            if part is None:
                raise LeaseError(
                    lease.request, f"nothing of sub-pool {sub_pool!r} is leased, only {sorted(parts)}"
                )
            part.take(lease.request, sub_pool, pages)
            self._open[key] = parts
            if part.is_written and all(other.is_written for other in parts.values()):
                self._end(key, "has been written whole")
            return part

    def end(self, key: LeaseKey, why: str) -> None:
        """Nothing more may be written under it."""
        with self._lock:
            self._end(key, why)

    def _end(self, key: LeaseKey, why: str) -> None:
        self._open.pop(key, None)
        self._ended[key] = why
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
