"""Engines that take pages instead of addresses, and check the lease themselves on both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy.typing as npt
from kvarena.transfer._batch import PageBatch
from kvarena.transfer.errors import TransferError, TransferFailed
from kvarena.transfer.pages.lease import Lease
from kvarena.transfer.pages.manifest import Manifest
from kvarena.transfer.protocol import Pending

__all__ = ["JoinedPending", "LeasedPageEngine", "submit_leased"]


@runtime_checkable
class LeasedPageEngine(Protocol):
    """What such an engine offers beyond `TransferEngine`; `SameHostEngine` is one.

    The sender's side refuses pages that the lease does not name. The receiver's side learns from the
    engine, and not from the sender's word, when all of a lease's pages are there.
    """

    def submit_pages(self, peer: str, batch: PageBatch) -> Pending:
        """Start writing leased pages of one sub-pool. Raises `LeaseError` or `TransferFailed`."""
        ...

    def admit(self, peer: str, lease: Lease) -> None:
        """Get to know a lease when its request arrives, so that the first write need not."""
        ...

    def expect(self, lease: Lease) -> Pending:
        """On the receiver's side: ends when all pages of a lease that was granted here are written."""
        ...

    def revoke(self, lease: Lease, why: str = ...) -> None:
        """On the receiver's side: take a lease back; on return nobody writes its pages any more."""
        ...


class JoinedPending:
    """Several transfers as one, which ends when the last of them does. Any thread may ask.

    Parameters
    ----------
    parts : sequence of Pending
    error : TransferError, optional
        Why a further part was not started: raised once the others have ended.
    """

    def __init__(self, parts: Sequence[Pending], error: TransferError | None = None) -> None:
        self._left = list(parts)
        self._error = error

    def done(self) -> bool:
        """See `Pending.done`."""
        for part in tuple(self._left):
            try:
                if not part.done():
                    return False
            except TransferFailed as error:
                self._error = self._error or error
            with contextlib.suppress(ValueError):  # another thread has asked, too
                self._left.remove(part)
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: float | None = None) -> None:
        """See `Pending.wait`; each part may take `timeout` seconds."""
        for part in list(self._left):
            try:
                part.wait(timeout)
            except TransferFailed:
                continue  # `done` finds it again, and keeps the first
        self.done()


def submit_leased(
    engine: LeasedPageEngine,
    peer: str,
    lease: Lease,
    manifest: Manifest,
    moves: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    bases: Mapping[str, tuple[int, int]],
) -> Pending:
    """Start writing the pages of several sub-pools under one lease.

    Parameters
    ----------
    moves : mapping of str to (array_like, array_like)
        Of each sub-pool, page ids here and there.
    bases : mapping of str to (int, int)
        Addresses of each sub-pool's page 0, here and in the peer's process.

    Raises
    ------
    LeaseError, TransferFailed
        Nothing was started.
    """
    parts: list[Pending] = []
    for name, (src, dst) in moves.items():
        try:
            page_bytes = manifest.sub_pool(name).page_bytes
            part = engine.submit_pages(peer, PageBatch(src, dst, page_bytes, lease, name, *bases[name]))
        except TransferError as error:
            if not parts:
                raise
            # What was started cannot be called back: the failure is told when it has ended.
            return JoinedPending(parts, error)
        parts.append(part)
    return parts[0] if len(parts) == 1 else JoinedPending(parts)
