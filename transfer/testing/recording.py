"""An engine that keeps a record and moves memory within this process; it enforces every rule."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from kvarena.transfer._batch import check_columns
from kvarena.transfer.errors import RegistrationError, TransferFailed
from kvarena.transfer.protocol import Addresses, Capabilities, Pending, Region
from kvarena.transfer.registration.regions import overlapping

__all__ = ["Call", "FinishedTransfer", "RecordingEngine"]

_serials = itertools.count(1)
_engines: weakref.WeakValueDictionary[str, RecordingEngine] = weakref.WeakValueDictionary()


class Call(NamedTuple):
    """One call that an engine got: what, and with which regions, peer or operations."""

    op: str
    detail: object


class FinishedTransfer:
    """A transfer that had ended when `submit` returned."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""


class RecordingEngine:
    """Registers into a table, copies with memmove, and refuses what the strictest real engine refuses.

    Overlaps, empty regions and unknown keys are refused; a transfer must lie inside one registered
    region on each side (inside the union if it crosses seams).

    Parameters
    ----------
    name : str
        As errors and listeners name it.
    capabilities : Capabilities, optional
        By default those of Mooncake over TCP.
    moves_memory : bool
        Whether a submitted transfer copies bytes; off, addresses may be of no memory at all.

    Attributes
    ----------
    calls : list of Call
        Every call in order, refused ones too.
    """

    def __init__(
        self,
        name: str = "recording",
        *,
        capabilities: Capabilities | None = None,
        moves_memory: bool = True,
    ) -> None:
        self.name = name
        self.capabilities = capabilities or Capabilities(
            crosses_seams=False, spans_handles=True, live_reregistration=True
        )
        self.moves_memory = moves_memory
        self.calls: list[Call] = []
        self._regions: dict[int, Region] = {}
        self._peers: set[str] = set()
        self._lock = threading.RLock()
        self._closed = False
        self.key = f"{name}-{next(_serials)}"
        _engines[self.key] = self

    @property
    def regions(self) -> tuple[Region, ...]:
        """What is registered, in ascending order."""
        return tuple(sorted(self._regions.values()))

    def register(self, regions: Sequence[Region]) -> None:
        """All or nothing; overlaps with what is there, or among each other, are refused."""
        with self._lock:
            self.calls.append(Call("register", tuple(regions)))
            after = dict(self._regions)
            for region in regions:
                if self._closed:
                    raise RegistrationError(self.name, region, "CLOSED", meaning="the engine is closed")
                if region.nbytes <= 0 or region.address < 0:
                    raise RegistrationError(self.name, region, "INVALID", meaning="an empty region")
                limit = self.capabilities.max_region_bytes
                if limit is not None and region.nbytes > limit:
                    raise RegistrationError(
                        self.name, region, "TOO_LARGE", meaning=f"the most is {limit} bytes"
                    )
                if other := overlapping(region, after.values()):
                    raise RegistrationError(self.name, region, "OVERLAP", meaning=f"overlaps {other}")
                after[region.address] = region
            self._regions = after

    def unregister(self, regions: Sequence[Region]) -> None:
        """All or nothing; address and length must be those of a registration."""
        with self._lock:
            self.calls.append(Call("unregister", tuple(regions)))
            after = dict(self._regions)
            for region in regions:
                if after.get(region.address) != region:
                    raise RegistrationError(
                        self.name,
                        region,
                        "NOT_REGISTERED",
                        action="unregister",
                        meaning="no such registration",
                        unknown=True,
                    )
                del after[region.address]
            self._regions = after

    def describe(self) -> bytes:
        """The key by which other engines of this process find this one."""
        return self.key.encode()

    def connect(self, description: bytes) -> str:
        """A peer of this process. Raises `TransferFailed` if it has gone."""
        key = description.decode(errors="replace")
        self.calls.append(Call("connect", key))
        peer = _engines.get(key)
        if peer is None or peer._closed:
            raise TransferFailed(self.name, key, "NO_PEER", "no such engine in this process")
        self._peers.add(key)
        return key

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        self.calls.append(Call("disconnect", peer))
        self._peers.discard(peer)

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Pending:
        """Copy at once; nothing is written unless every operation may be."""
        columns = check_columns(self.name, peer, src, dst, lengths)
        operations = list(zip(*(column.tolist() for column in columns), strict=True))
        self.calls.append(Call("submit", (peer, operations)))
        target = _engines.get(peer)
        if peer not in self._peers or target is None or target._closed:
            raise TransferFailed(self.name, peer, "NO_PEER", "not connected", operations=len(operations))
        for source, address, nbytes in operations:
            for where, engine, start in (("here", self, source), ("of the target", target, address)):
                if not engine._covers(Region(start, nbytes)):
                    raise TransferFailed(
                        self.name,
                        peer,
                        "NOT_REGISTERED",
                        f"[{start:#x}, +{nbytes}) lies in no registered region {where}",
                        operations=len(operations),
                    )
        if self.moves_memory:
            for source, address, nbytes in operations:
                ctypes.memmove(address, source, nbytes)
        return FinishedTransfer()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            if not self._closed:
                self.calls.append(Call("close", None))
            self._closed = True
            self._regions.clear()
            self._peers.clear()

    def _covers(self, wanted: Region) -> bool:
        position = wanted.address
        for region in self.regions:
            if region.address <= position < region.end:
                if wanted.end <= region.end:
                    return True
                if not self.capabilities.crosses_seams:
                    return False
                position = region.end
        return wanted.nbytes == 0
