"""Which of a receiver's pages may be written, by which request, until when."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from kvarena.transfer.errors import LeaseError, QuiesceTimeout
from kvarena.transfer.pages.plan import leased_ids, page_ids
from kvarena.transfer.registration.gate import Quiesce

__all__ = ["Lease", "LeaseTable"]

# How many revoked leases are remembered, so that a late message about one is answered by its reason.
_REMEMBERED = 1024
# As far as a peer may name any; msgspec checks it when it decodes.
_PageId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's permission to write some of its pages; it travels to the sender with the request."""

    request: str
    serial: int
    """Differs between two leases of one table, even for the same request."""
    epoch: int
    """Of the receiver's ledger when it was granted."""
    pages: dict[str, tuple[_PageId, ...]]
    """Sub-pool name to the physical page ids."""

    def check(self, sub_pool: str, pages: npt.ArrayLike, *, epoch: int | None = None) -> None:
        """Whether these pages are among those leased; the sender asks before it submits.

        Parameters
        ----------
        sub_pool : str
            Whose pages.
        pages : array_like of int
            Destination page ids.
        epoch : int, optional
            Of the receiver's registration as the sender last connected to it.

        Raises
        ------
        LeaseError
            Naming the first page that is not leased, or both epochs.
        PageError
            `pages` are no integers.
        """
        if epoch is not None and epoch < self.epoch:
            raise LeaseError(
                self.request,
                f"granted at epoch {self.epoch}, but the peer is known as of epoch {epoch}",
                fix="Connect to its new description first.",
            )
        if sub_pool not in self.pages:
            raise LeaseError(
                self.request, f"nothing of sub-pool {sub_pool!r} is leased, only {sorted(self.pages)}"
            )
        wanted = page_ids(pages).ravel()
        leased = leased_ids(self.request, sub_pool, self.pages[sub_pool])
        outside = wanted[~np.isin(wanted, leased)]
        if outside.size:
            raise LeaseError(
                self.request,
                f"{outside.size} pages of {sub_pool!r} are not leased, page {int(outside[0])} first",
            )

    def encode(self) -> bytes:
        """For the control plane."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Lease:
        """From a peer. Raises `LeaseError` if the bytes are no lease."""
        try:
            return msgspec.msgpack.decode(encoded, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise LeaseError("?", f"unreadable: {error}") from error


class LeaseTable:
    """A receiver's leases: a page is leased to one request at a time, and ends once.

    Parameters
    ----------
    gate : Quiesce, optional
        Entered for as long as a lease is out, so that a ledger which must replace its regions
        waits for writers on other machines.
    on_complete : callable, optional
        Called with each lease whose pages have been written, such as `PageChannel.count_received`.
    """

    def __init__(
        self, *, gate: Quiesce | None = None, on_complete: Callable[[Lease], None] | None = None
    ) -> None:
        self._gate = gate
        self._on_complete = on_complete
        self._changed = threading.Condition()
        self._serials = itertools.count(1)
        self._leases: dict[str, Lease] = {}
        self._owner: dict[tuple[str, int], str] = {}
        self._limits: dict[str, int] = {}
        self._revoked: OrderedDict[int, str] = OrderedDict()

    @property
    def active(self) -> tuple[Lease, ...]:
        """The leases that are out."""
        with self._changed:
            return tuple(self._leases.values())

    def grant(
        self, request: str, pages: Mapping[str, Iterable[int]], *, epoch: int, gate_timeout: float = 30.0
    ) -> Lease:
        """Lease pages to a request.

        Raises
        ------
        LeaseError
            The request has a lease, a page is leased already, is given twice, is negative, is no
            integer of 64 bits, or lies in a tail that is being given back. Nothing is leased then.
        QuiesceTimeout
            The gate stayed closed.
        """
        asked = {name: _as_tuple(request, name, ids) for name, ids in pages.items()}
        if self._gate is not None:
            self._gate.enter(gate_timeout)
        try:
            with self._changed:
                self._refuse(request, asked)
                lease = Lease(request=request, serial=next(self._serials), epoch=index(epoch), pages=asked)
                self._leases[request] = lease
                self._owner.update({(name, page): request for name, ids in asked.items() for page in ids})
        except BaseException:
            if self._gate is not None:
                self._gate.leave()
            raise
        return lease

    def check(self, request: str, serial: int) -> Lease:
        """The lease, if it is still out. Raises `LeaseError` with the reason if it is not."""
        with self._changed:
            lease = self._leases.get(request)
            if lease is not None and lease.serial == serial:
                return lease
            if serial in self._revoked:
                raise LeaseError(request, f"lease {serial} was revoked: {self._revoked[serial]}")
            raise LeaseError(request, f"lease {serial} is not out")

    def complete(self, request: str, serial: int) -> Lease:
        """The pages have been written: end the lease and return it. Raises `LeaseError` as `check` does."""
        with self._changed:
            lease = self.check(request, serial)
            self._end(lease)
        if self._on_complete is not None:
            self._on_complete(lease)
        return lease

    def revoke(self, request: str, reason: str) -> Lease | None:
        """End a request's lease because something failed; returns it, or None if none is out."""
        with self._changed:
            lease = self._leases.get(request)
            if lease is None:
                return None
            self._revoked[lease.serial] = reason
            while len(self._revoked) > _REMEMBERED:
                self._revoked.popitem(last=False)
            self._end(lease)
        return lease

    def drain_tail(self, first_pages: Mapping[str, int], timeout: float = 30.0) -> None:
        """Grant nothing from these pages on, and wait until nothing there is leased.

        Called before a tail is unregistered and given back; `open_tail` takes the limit away.

        Parameters
        ----------
        first_pages : mapping of str to int
            For each sub-pool, the first page of the tail.

        Raises
        ------
        QuiesceTimeout
            Some leases stayed; the previous limits hold again.
        """
        with self._changed:
            before = dict(self._limits)
            self._limits.update(first_pages)
            if not self._changed.wait_for(lambda: not self._in_tail(first_pages), timeout):
                self._limits = before
                raise QuiesceTimeout(
                    "Leases on the tail did not drain",
                    in_flight=len(self._in_tail(first_pages)),
                    seconds=timeout,
                    fix="Revoke them, or try again later.",
                )

    def open_tail(self) -> None:
        """Grant everywhere again."""
        with self._changed:
            self._limits.clear()

    def _refuse(self, request: str, asked: dict[str, tuple[int, ...]]) -> None:
        if request in self._leases:
            raise LeaseError(request, f"it has lease {self._leases[request].serial} already")
        for name, ids in asked.items():
            if len(set(ids)) != len(ids):
                raise LeaseError(request, f"a page of {name!r} is given twice")
            for page in ids:
                if page < 0:
                    raise LeaseError(request, f"page {page} of {name!r} does not exist")
                if page >= self._limits.get(name, page + 1):
                    raise LeaseError(request, f"page {page} of {name!r} is being given back")
                if (name, page) in self._owner:
                    raise LeaseError(
                        request, f"page {page} of {name!r} is leased to {self._owner[name, page]}"
                    )

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.request]
        for name, ids in lease.pages.items():
            for page in ids:
                del self._owner[name, page]
        self._changed.notify_all()
        if self._gate is not None:
            self._gate.leave()

    def _in_tail(self, first_pages: Mapping[str, int]) -> list[Lease]:
        return [
            lease
            for lease in self._leases.values()
            if any(max(lease.pages.get(name, ()), default=-1) >= first for name, first in first_pages.items())
        ]


def _as_tuple(request: str, sub_pool: str, ids: Iterable[int]) -> tuple[int, ...]:
    found = leased_ids(request, sub_pool, ids if isinstance(ids, np.ndarray) else list(ids))
    if found.ndim != 1:
        raise LeaseError(request, f"its pages of {sub_pool!r} have shape {found.shape}, not (n,)")
    return tuple(found.tolist())
