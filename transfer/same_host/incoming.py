"""Leased pages that a receiver waits for, and what its senders' rings say of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from kvarena.transfer._batch import PageLease
from kvarena.transfer.errors import LeaseError, TransferError, TransferFailed, TransferTimeout
from kvarena.transfer.same_host.copy.clock import await_clock
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.ring import RECORDS, Record, Ring
from kvarena.transfer.same_host.sent_leases import LeaseKey, lease_digest

__all__ = ["Incoming", "IncomingTable", "Source"]


@final
class Incoming:
    """The pages of one lease, as they arrive; a `kvarena.transfer.Pending` on the receiver's side.

    It has ended well only when a peer has reported every leased page written, under this very lease,
    into memory of the present or a later epoch.
    """

    def __init__(self, lease: PageLease, epoch: int, sender: str | None, table: IncomingTable) -> None:
        self.lease = lease
        self.request = lease.request
        self.serial = lease.serial
        self.epoch = epoch
        self.digest = lease_digest(lease)
        self._names = sorted(lease.pages)
        self._left = [len(lease.pages[name]) for name in self._names]
        self._sender = sender
        self._table = table
        self.error: TransferError | None = None
        self.is_over = not any(self._left)

    @property
    def sender(self) -> str | None:
        """The peer that writes it, once that is known."""
        return self._sender

    @property
    def pages_left(self) -> int:
        """Pages that no peer has reported yet."""
        self._table.collect()
        return sum(self._left)

    def done(self) -> bool:
        """Whether all pages are there; raises `TransferFailed` or `LeaseError` if they will not come."""
        if not self.is_over:
            self._table.collect()
        if self.error is not None:
            raise self.error
        return self.is_over

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
        over = await_clock(self._look, 0, timeout)
        if self.error is not None:
            raise self.error
        if not over:
            raise TransferTimeout(
                "same-host", self._sender or "any peer", timeout or 0.0, request=self.request
            )

    def bind(self, sender: str) -> None:
        """That peer writes it, and no other; raises `WireError` if another does."""
        if self._sender not in (None, sender):
            raise WireError(f"{sender} writes pages that are leased to {self._sender}")
        self._sender = sender

    def written(self, sender: str, record: Record) -> None:
        """A peer reports pages; raises `WireError` if that cannot be."""
        self.bind(sender)
        left = self._left[record.part] if record.part < len(self._left) else 0
        if not 0 < record.pages <= left:
            raise WireError(f"{record.pages} pages of sub-pool {record.part} reported, {left} are awaited")
        if record.epoch < self.epoch:
            raise WireError(f"written as of epoch {record.epoch}, the lease is of {self.epoch}")
        self._left[record.part] = left - record.pages
        self.is_over = not any(self._left)

    def fail(self, error: TransferError) -> None:
        """They will not come; once they are all there, this changes nothing."""
        if not self.is_over:
            self.error = error
            self.is_over = True

    def _look(self, _number: int) -> bool:
        if not self.is_over:
            self._table.collect()
        return self.is_over


@final
class Source:
    """One sender's ring, as the receiver reads it."""

    __slots__ = ("is_sane", "name", "on_nonsense", "ring")

    def __init__(self, name: str, ring: Ring, on_nonsense: Callable[[str], None]) -> None:
        self.name = name
        self.ring = ring
        self.on_nonsense = on_nonsense
        self.is_sane = True


@final
class IncomingTable:
    """All leases that a receiver waits for. Whoever waits reads the rings; nobody else has to."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: dict[LeaseKey, Incoming] = {}
        self._by_digest: dict[bytes, Incoming] = {}
        self._sources: tuple[Source, ...] = ()

    def expect(self, lease: PageLease, epoch: int, sender: str | None) -> Incoming:
        """Wait for one more; raises `LeaseError` if it is awaited already."""
        key = (lease.request, lease.serial)
        incoming = Incoming(lease, epoch, sender, self)
        with self._lock:
            if key in self._waiting:
                raise LeaseError(lease.request, f"lease {lease.serial} is awaited already")
            if not incoming.is_over:
                self._waiting[key] = self._by_digest[incoming.digest] = incoming
        return incoming

    def listen(self, source: Source) -> None:
        """Read that ring, too."""
        with self._lock:
            self._sources += (source,)

    def collect(self) -> None:
        """Take note of every copy that has ended since the last time."""
        for source in self._sources:
            if source.is_sane and source.ring.has_news:
                with self._lock:
                    self._read(source)

    def bound(self, sender: str, key: LeaseKey) -> None:
        """A peer says that it will write a lease; raises `WireError` if another does."""
        with self._lock:
            incoming = self._waiting.get(key)
            if incoming is not None:
                incoming.bind(sender)

    def failed(self, sender: str, key: LeaseKey, why: str) -> None:
        """A peer will not write them; raises `WireError` if another does."""
        with self._lock:
            self.bound(sender, key)
            self._fail(key, TransferFailed("same-host", sender, "sender", why, request=key[0]))

    def revoke(self, key: LeaseKey, why: str) -> str | None:
        """We do not want them any more; the only peer that may write them, if that is known."""
        with self._lock:
            incoming = self._waiting.get(key)
            self._fail(key, LeaseError(key[0], why))
            return None if incoming is None else incoming.sender

    def lost(self, gone: Source | None, why: str) -> None:
        """A peer is gone: what it had begun will not end. None: everything.

        Its successor of the same name may be read already: only its own ring is closed.
        """
        sender = None if gone is None else gone.name
        with self._lock:
            begun: set[bytes] = set()
            for source in self._sources:
                if gone in (None, source):
                    if source.is_sane:
                        self._read(source)  # what it had finished counts
                    begun.update(record.digest for record in source.ring.begun())
                    source.ring.close()
            self._sources = tuple(source for source in self._sources if gone not in (None, source))
            for key, incoming in list(self._waiting.items()):
                if sender is None or incoming.sender == sender or incoming.digest in begun:
                    self._fail(
                        key,
                        TransferFailed("same-host", sender or "any peer", "peer", why, request=key[0]),
                    )

    def _read(self, source: Source) -> None:
        try:
            # A sender that keeps its ring full must not keep whoever waits.
            for _ in range(RECORDS):
                found = source.ring.next_ended()
                if found is None:
                    return
                record, good = found
                # Those of a lease that is not awaited (revoked since, or of none) count nowhere.
                incoming = self._by_digest.get(record.digest)
                if incoming is None:
                    continue
                key = (incoming.request, incoming.serial)
                if not good:
                    self.failed(source.name, key, "a copy of its pages failed")
                    continue
                incoming.written(source.name, record)
                if incoming.is_over:
                    self._forget(key)
        except WireError as error:
            source.is_sane = False
            source.on_nonsense(str(error))

    def _fail(self, key: LeaseKey, error: TransferError) -> None:
        with self._lock:
            incoming = self._forget(key)
            if incoming is not None:
                incoming.fail(error)

    def _forget(self, key: LeaseKey) -> Incoming | None:
        incoming = self._waiting.pop(key, None)
        if incoming is not None:
            del self._by_digest[incoming.digest]
        return incoming
