"""Leased pages that a receiver waits for, and what peers have reported of them."""

from __future__ import annotations

import threading
from typing import final

from kvarena.transfer._same_host_errors import WireError
from kvarena.transfer._same_host_leases import LeaseKey, PageLease
from kvarena.transfer.errors import LeaseError, TransferError, TransferFailed, TransferTimeout

__all__ = ["Incoming", "IncomingTable"]


@final
class Incoming:
    """The pages of one lease, as they arrive; a `kvarena.transfer.Pending` on the receiver's side.

    It has ended well only when a peer has reported every leased page written, under this very lease,
    into memory of the present or a later epoch.
    """

    def __init__(self, lease: PageLease, epoch: int) -> None:
        self.request = lease.request
        self.serial = lease.serial
        self.epoch = epoch
        self._left = {name: len(pages) for name, pages in lease.pages.items()}
        self._sender: str | None = None
        self._changed = threading.Condition()
        self._error: TransferError | None = None

    @property
    def sender(self) -> str | None:
        """The peer that has written, once one has."""
        return self._sender

    @property
    def pages_left(self) -> int:
        """Pages that no peer has reported yet."""
        return sum(self._left.values())

    def done(self) -> bool:
        """Whether all pages are there; raises `TransferFailed` or `LeaseError` if they will not come."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return not any(self._left.values())

    def wait(self, timeout: float | None = None) -> None:
        """Block until all pages are there.

        Raises
        ------
        TransferFailed
            The sender gave up or died.
        LeaseError
            The lease was revoked here.
        TransferTimeout
            They were not there after `timeout` seconds.
        """
        with self._changed:
            over = self._changed.wait_for(
                lambda: self._error is not None or not any(self._left.values()), timeout
            )
            if self._error is not None:
                raise self._error
        if not over:
            raise TransferTimeout(
                "same-host", self._sender or "any peer", timeout or 0.0, request=self.request
            )

    def written(self, sender: str, sub_pool: str, pages: int, epoch: int) -> None:
        """A peer reports pages; raises `WireError` if that cannot be."""
        with self._changed:
            if self._sender not in (None, sender):
                raise WireError(f"{sender} writes pages that are leased to {self._sender}")
            left = self._left.get(sub_pool, 0)
            if not 0 < pages <= left:
                raise WireError(f"{pages} pages of {sub_pool!r} reported, {left} are awaited")
            if epoch < self.epoch:
                raise WireError(f"written as of epoch {epoch}, the lease is of {self.epoch}")
            self._sender = sender
            self._left[sub_pool] = left - pages
            self._changed.notify_all()

    def fail(self, error: TransferError) -> None:
        """They will not come; once they are all there, this changes nothing."""
        with self._changed:
            if self._error is None and any(self._left.values()):
                self._error = error
                self._changed.notify_all()


@final
class IncomingTable:
    """All leases that a receiver waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[LeaseKey, Incoming] = {}

    def expect(self, lease: PageLease, epoch: int) -> Incoming:
        """Wait for one more; raises `LeaseError` if it is awaited already."""
        key = (lease.request, lease.serial)
        incoming = Incoming(lease, epoch)
        with self._lock:
            if key in self._waiting:
                raise LeaseError(lease.request, f"lease {lease.serial} is awaited already")
            self._waiting[key] = incoming
        return incoming

    def written(self, sender: str, key: LeaseKey, sub_pool: str, pages: int, epoch: int) -> None:
        """A peer reports pages; those of a lease that is not awaited (revoked since) count nowhere."""
        with self._lock:
            incoming = self._waiting.get(key)
        if incoming is None:
            return
        incoming.written(sender, sub_pool, pages, epoch)
        if not incoming.pages_left:
            self._forget(key)

    def failed(self, sender: str, key: LeaseKey, why: str) -> None:
        """A peer will not write them."""
        incoming = self._forget(key)
        if incoming is not None:
            incoming.fail(TransferFailed("same-host", sender, "sender", why, request=key[0]))

    def revoke(self, key: LeaseKey, why: str) -> None:
        """We do not want them any more."""
        incoming = self._forget(key)
        if incoming is not None:
            incoming.fail(LeaseError(key[0], why))

    def lost(self, sender: str | None, why: str) -> None:
        """A peer is gone: what it had begun will not end. None: everything."""
        with self._lock:
            gone = [k for k, incoming in self._waiting.items() if sender is None or incoming.sender == sender]
            failed = [(key, self._waiting.pop(key)) for key in gone]
        for key, incoming in failed:
            incoming.fail(TransferFailed("same-host", sender or "any peer", "peer", why, request=key[0]))

    def _forget(self, key: LeaseKey) -> Incoming | None:
        with self._lock:
            return self._waiting.pop(key, None)
