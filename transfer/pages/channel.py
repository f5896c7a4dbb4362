"""Both ends of a page transfer over one engine: what they tell each other, and what they check first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from kvarena.transfer.errors import Difference, LeaseError, ManifestMismatch, TransferFailed, TransferTimeout
from kvarena.transfer.pages.lease import Lease
from kvarena.transfer.pages.leased_pages import LeasedPageEngine, submit_leased
from kvarena.transfer.pages.manifest import Manifest
from kvarena.transfer.pages.plan import PageCopies, PageSide, join_copies, plan_page_copies
from kvarena.transfer.protocol import Pending
from kvarena.transfer.registration.ledger import RegistrationLedger

__all__ = ["ArenaPages", "PageChannel", "PageMoves", "PeerPages"]


# How many revoked leases are remembered, so that nothing is written under them when they come late.
_REMEMBERED = 1 << 16


class ArenaPages(NamedTuple):
    """Where a sub-pool's pages are: the part of a manifest that two sides need not share."""

    address: int
    """Of page 0."""
    num_pages: int
    """Pages with memory."""


class PageMoves(NamedTuple):
    """Page ``src[i]`` of ours goes onto page ``dst[i]`` of the peer's."""

    src: npt.ArrayLike
    dst: npt.ArrayLike


# What a peer says is used as a 64-bit address.
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class PeerPages(msgspec.Struct, frozen=True, kw_only=True):
    """What one side tells the other before the first transfer, and again after each registration."""

    engine: str
    description: bytes
    manifest: Manifest
    epoch: int
    seams: tuple[_Address, ...]
    pages: dict[str, tuple[_Address, _Address]]


class PageChannel:
    """Compares manifests, checks leases, plans the copies and submits them.

    Parameters
    ----------
    ledger : RegistrationLedger
        Of the engine to use; its gate counts what is in flight.
    manifest : Manifest
        Of this side's arena.
    pages : callable
        Answers where each sub-pool's pages are now, ``{name: ArenaPages}``.
    """

    def __init__(
        self, ledger: RegistrationLedger, manifest: Manifest, pages: Callable[[], Mapping[str, ArenaPages]]
    ) -> None:
        self.ledger = ledger
        self.engine = ledger.engine
        self.leased = ledger.engine if isinstance(ledger.engine, LeasedPageEngine) else None
        """The engine, if it takes pages and checks the lease on both sides."""
        self.manifest = manifest
        self._pages = pages
        self._peers: dict[str, PeerPages] = {}
        self._revoked: dict[tuple[str, str, int], None] = {}
        self._sent: dict[tuple[str, str, int], list[_Gated]] = {}
        self._lock = threading.Lock()

    def hello(self) -> bytes:
        """For the control plane; to be sent again whenever the ledger's epoch has changed."""
        # First: if the ledger moves meanwhile, what is said here is said to be older than it is, and a
        # lease of the new epoch waits for the next hello.
        epoch = self.ledger.epoch
        return msgspec.msgpack.encode(
            PeerPages(
                engine=self.engine.name,
                description=self.engine.describe(),
                manifest=self.manifest,
                epoch=epoch,
                seams=self.ledger.seams,
                pages={name: (pages.address, pages.num_pages) for name, pages in self._pages().items()},
            )
        )

    def connect(self, hello: bytes) -> str:
        """A peer from its hello, or the refreshed one; returns its key.

        Raises
        ------
        ManifestMismatch
            Its pages are not ours; the engine was not asked.
        TransferFailed
            The engine cannot reach it.
        """
        try:
            theirs = msgspec.msgpack.decode(hello, type=PeerPages)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ManifestMismatch([Difference("hello", "a kvarena hello", str(error))]) from error
        self.manifest.check(theirs.manifest)
        if theirs.engine != self.engine.name:
            raise ManifestMismatch([Difference("engine", self.engine.name, theirs.engine)])
        names = [sub_pool.name for sub_pool in self.manifest.sub_pools]
        if not theirs.pages.keys() >= set(names):
            raise ManifestMismatch([Difference("pages", names, list(theirs.pages))])
        key = self.engine.connect(theirs.description)
        with self._lock:
            self._peers[key] = theirs
        return key

    def disconnect(self, peer: str) -> None:
        """Forget a peer; what is in flight to it no longer counts."""
        self.engine.disconnect(peer)
        with self._lock:
            self._peers.pop(peer, None)
            self._revoked = {lease: None for lease in self._revoked if lease[0] != peer}
            gone = [lease for lease in self._sent if lease[0] == peer]
            pending = [transfer for lease in gone for transfer in self._sent.pop(lease)]
        for transfer in pending:
            transfer.forget()

    def send(
        self, peer: str, lease: Lease, moves: Mapping[str, PageMoves], *, gate_timeout: float = 30.0
    ) -> Pending:
        """Start writing pages that the peer has leased to a request.

        The caller keeps the source pages pinned, and polls or waits until the transfer has ended:
        until then it counts as in flight.

        Raises
        ------
        LeaseError
            A page is not leased, the lease was revoked, or it is newer than the peer's last hello.
        PageError
            A page or a sub-pool does not exist.
        TransferFailed
            The engine refused; names the request, so that the receiver can be told at once.
        QuiesceTimeout
            The registration was being replaced all the time.
        """
        self.ledger.gate.enter(gate_timeout)
        transfer = _Gated(self.engine.name, peer, lease.request, self.ledger)
        try:
            pending = self._submit(peer, self._enter(peer, lease, transfer), lease, moves)
            nbytes = sum(
                np.size(dst) * self.manifest.sub_pool(name).page_bytes for name, (_, dst) in moves.items()
            )
            transfer.begin(pending, nbytes)
        except BaseException as error:
            transfer.give_up()
            if isinstance(error, TransferFailed):
                self.ledger.traffic.failed()
            raise
        self.ledger.traffic.submitted(peer)
        return transfer

    def admit(self, peer: str, lease: Lease) -> None:
        """A request has arrived: let an engine that checks leases itself know this one in time."""
        if self.leased is not None:
            self.leased.admit(peer, lease)

    def expect(self, lease: Lease) -> Pending | None:
        """On the receiver's side, before a lease goes out: what ends when its pages are there.

        None: this engine does not tell a receiver, the sender's word has to do.
        """
        return None if self.leased is None else self.leased.expect(lease)

    def count_received(self, lease: Lease) -> None:
        """On the receiver's side: the pages of a lease have been written."""
        self.ledger.traffic.received(
            sum(len(pages) * self.manifest.sub_pool(name).page_bytes for name, pages in lease.pages.items())
        )

    def take_back(self, lease: Lease, why: str) -> None:
        """On the receiver's side: let nobody write under a lease any more, if the engine can see to it."""
        if self.leased is not None:
            self.leased.revoke(lease, why)

    def revoke(self, peer: str, request: str, serial: int, timeout: float = 30.0) -> None:
        """The receiver takes a lease back: send nothing more, and wait until nothing is being written.

        Raises
        ------
        TransferTimeout
            Something still is; the receiver must not use these pages yet.
        """
        key = (peer, request, serial)
        with self._lock:
            self._revoked[key] = None
            if len(self._revoked) > _REMEMBERED:
                del self._revoked[next(iter(self._revoked))]
            pending = list(self._sent.get(key, ()))
        for transfer in pending:
            try:
                transfer.wait(timeout)
            except TransferFailed:
                continue

    def _enter(self, peer: str, lease: Lease, transfer: _Gated) -> PeerPages:
        """Let `revoke` know of a transfer before it begins: then either this is refused, or that waits."""
        key = (peer, lease.request, lease.serial)
        with self._lock:
            theirs = self._peers.get(peer)
            if theirs is None:
                raise TransferFailed(self.engine.name, peer, None, "not connected", request=lease.request)
            if key in self._revoked:
                raise LeaseError(lease.request, f"lease {lease.serial} was revoked")
            self._sent[key] = [other for other in self._sent.get(key, ()) if not other.ended] + [transfer]
            for other in [other for other, sent in self._sent.items() if all(one.ended for one in sent)]:
                del self._sent[other]
        return theirs

    def _submit(self, peer: str, theirs: PeerPages, lease: Lease, moves: Mapping[str, PageMoves]) -> Pending:
        for name, (_, dst) in moves.items():
            self.manifest.sub_pool(name)
            lease.check(name, dst, epoch=theirs.epoch)
        try:
            if self.leased is not None:
                ours = self._pages()
                bases = {name: (ours[name].address, theirs.pages[name][0]) for name in moves}
                return submit_leased(self.leased, peer, lease, self.manifest, moves, bases)
            return self.engine.submit(peer, *self._plan(theirs, moves))
        except TransferFailed as error:
            raise error.of(lease.request) from error

    def _plan(self, theirs: PeerPages, moves: Mapping[str, PageMoves]) -> PageCopies:
        ours = self._pages()
        plans = []
        for name, (src, dst) in moves.items():
            address, num_pages = theirs.pages[name]
            here = PageSide(ours[name].address, src, self.ledger.seams, ours[name].num_pages)
            there = PageSide(address, dst, theirs.seams, num_pages)
            plans.append(plan_page_copies(here, there, self.manifest.sub_pool(name).page_bytes))
        return join_copies(*plans)


class _Gated:
    """A transfer that leaves the gate when it has ended, and whose failure names its request."""

    def __init__(self, engine: str, peer: str, request: str, ledger: RegistrationLedger) -> None:
        self._engine = engine
        self._peer = peer
        self._request = request
        self._gate = ledger.gate
        self._traffic = ledger.traffic
        self._nbytes = 0
        self._began = time.monotonic()
        self._lock = threading.Lock()
        # Until then it is about to begin; None after that: it did not.
        self._begun = threading.Event()
        self._pending: Pending | None = None
        self.ended = False

    def begin(self, pending: Pending, nbytes: int) -> None:
        """It is under way."""
        self._pending, self._nbytes = pending, nbytes
        self._begun.set()

    def done(self) -> bool:
        if self._pending is None:
            return self.ended
        try:
            ended = self._pending.done()
        except TransferFailed as error:
            self._count_failure()
            raise error.of(self._request) from error
        if ended:
            self._count_bytes()
        return ended

    def wait(self, timeout: float | None = None) -> None:
        if not self._begun.wait(timeout):
            raise TransferTimeout(self._engine, self._peer, timeout or 0.0, request=self._request)
        if self._pending is None:
            return
        try:
            self._pending.wait(timeout)
        except TransferFailed as error:
            self._count_failure()
            raise error.of(self._request) from error
        except TransferTimeout as error:
            raise error.of(self._request) from error
        self._count_bytes()

    def forget(self) -> bool:
        """Leave the gate; False when it has been left already."""
        with self._lock:
            if self.ended:
                return False
            self.ended = True
        self._gate.leave()
        return True

    def give_up(self) -> None:
        """It will not begin."""
        self.forget()
        self._begun.set()

    def _count_bytes(self) -> None:
        if self.forget():
            self._traffic.ended(self._nbytes, time.monotonic() - self._began)

    def _count_failure(self) -> None:
        if self.forget():
            self._traffic.failed()
