"""What an engine lets its peers map and write: registered regions, and the handles beneath them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from kvarena.errors import KvArenaError
from kvarena.transfer.errors import RegistrationError
from kvarena.transfer.protocol import Region
from kvarena.transfer.same_host.intervals import Intervals
from kvarena.transfer.same_host.memory import ArenaMemory
from kvarena.transfer.same_host.wire import FDS_PER_PACKET

__all__ = ["ExportPage", "Exports"]

# Keeps a packet's body far below its limit: a row has two numbers of at most 19 digits.
_ROWS_PER_PACKET = 512


class ExportPage(NamedTuple):
    """One packet's worth of an update, with the descriptors that go with it."""

    body: dict[str, Any]
    fds: tuple[int, ...]


@dataclass(frozen=True)
class _Exported:
    serial: int
    offset: int
    nbytes: int
    handle: int
    fd: int


@final
class Exports:
    """Registered regions of one arena and one open descriptor for each handle that they touch.

    Not thread-safe: the engine holds its lock.
    """

    def __init__(self, arena: ArenaMemory, engine: str) -> None:
        self._arena = arena
        self._engine = engine
        self._serials = itertools.count(1)
        self._held: tuple[_Exported, ...] = ()
        self.regions: tuple[Region, ...] = ()
        self.intervals = Intervals()
        self.epoch = 0
        self._closed = False

    def add(self, regions: Sequence[Region]) -> None:
        """Register more; all or nothing. Raises `RegistrationError`."""
        self._require_open(regions, "register")
        backed_end = self._arena.base + self._arena.backed_bytes
        for region in regions:
            if region.nbytes <= 0:
                raise self._refusal(region, "EINVAL", f"a region of {region.nbytes} bytes")
            if region.address < self._arena.base or region.end > backed_end:
                raise self._refusal(
                    region,
                    "EFAULT",
                    f"only [{self._arena.base:#x}, +{self._arena.backed_bytes}) of the arena is backed",
                    fix="Back memory first, then register it; buffers outside the arena need another engine.",
                )
            if self.intervals.touches(region.address, region.end):
                raise self._refusal(
                    region, "EEXIST", "it overlaps a registered region", fix="Unregister that first."
                )
        ordered = sorted(regions)
        for first, second in itertools.pairwise(ordered):
            if second.address < first.end:
                raise self._refusal(
                    second, "EEXIST", f"it overlaps [{first.address:#x}, +{first.nbytes}) beside it"
                )
        wanted = (*self.regions, *regions)
        self._move(wanted, regions[0] if regions else Region(0, 0))

    def check_held(self, regions: Sequence[Region]) -> list[Region]:
        """What would be left without these. Raises `RegistrationError` unless all are registered."""
        self._require_open(regions, "unregister")
        left = list(self.regions)
        for region in regions:
            if region not in left:
                raise RegistrationError(
                    self._engine,
                    region,
                    "ENOENT",
                    action="unregister",
                    meaning="it is not registered",
                    unknown=True,
                )
            left.remove(region)
        return left

    def remove(self, regions: Sequence[Region]) -> None:
        """Take back exactly these; all or nothing. Raises `RegistrationError`."""
        left = self.check_held(regions)
        self._move(tuple(left), regions[0] if regions else Region(0, 0))

    def refresh(self) -> bool:
        """Look at the arena's handles again; whether anything changed."""
        if self._closed:
            return False
        before = self._held
        self._move(self.regions, Region(self._arena.base, self._arena.backed_bytes))
        return before != self._held

    def close(self) -> None:
        """Let every descriptor go."""
        self._closed = True
        for held in self._held:
            os.close(held.fd)
        self._held, self.regions, self.intervals = (), (), Intervals()

    def update_for(self, known: Set[int]) -> Iterator[ExportPage]:
        """The packets that bring a peer from the handles that it knows to the present ones."""
        held = {exported.serial: exported for exported in self._held}
        drop = [[serial] for serial in sorted(known - held.keys())]
        add = [held[serial] for serial in sorted(held.keys() - known)]
        regions = [[region.address - self._arena.base, region.nbytes] for region in self.regions]
        while True:
            batch, add = add[:FDS_PER_PACKET], add[FDS_PER_PACKET:]
            body: dict[str, Any] = {
                "epoch": self.epoch,
                "drop": drop[:_ROWS_PER_PACKET],
                "add": [[e.serial, e.offset, e.nbytes] for e in batch],
                "regions": regions[:_ROWS_PER_PACKET],
            }
            drop, regions = drop[_ROWS_PER_PACKET:], regions[_ROWS_PER_PACKET:]
            body["more"] = bool(add or drop or regions)
            yield ExportPage(body, tuple(e.fd for e in batch))
            if not body["more"]:
                return

    @property
    def handles(self) -> frozenset[int]:
        """Serial numbers of the exported handles: what a peer knows when it was sent an update whole."""
        return frozenset(exported.serial for exported in self._held)

    def _move(self, regions: tuple[Region, ...], blamed: Region) -> None:
        base, intervals = self._arena.base, Intervals(regions)
        touched = [
            m for m in self._arena.mappings if intervals.touches(base + m.offset, base + m.offset + m.nbytes)
        ]
        known = {(held.offset, held.nbytes, held.handle): held for held in self._held}
        fresh: list[_Exported] = []
        after: list[_Exported] = []
        try:
            for mapping in touched:
                key = (mapping.offset, mapping.nbytes, mapping.handle)
                exported = known.pop(key, None)
                if exported is None:
                    fd = self._arena.driver.export_fd(mapping.handle)
                    exported = _Exported(next(self._serials), *key, fd)
                    fresh.append(exported)
                after.append(exported)
        except (KvArenaError, OSError) as error:
            for exported in fresh:
                os.close(exported.fd)
            raise self._refusal(blamed, "EXPORT", f"a handle cannot be exported: {error}") from error
        for gone in known.values():
            os.close(gone.fd)
        if regions != self.regions or tuple(after) != self._held:
            self.epoch += 1
        self._held, self.regions, self.intervals = tuple(after), regions, intervals

    def _require_open(self, regions: Sequence[Region], action: str) -> None:
        if self._closed:
            region = Region(*regions[0]) if regions else Region(0, 0)
            raise RegistrationError(
                self._engine, region, "EBADF", action=action, meaning="this engine is closed"
            )

    def _refusal(self, region: Region, code: str, meaning: str, *, fix: str = "") -> RegistrationError:
        return RegistrationError(self._engine, region, code, meaning=meaning, fix=fix)
