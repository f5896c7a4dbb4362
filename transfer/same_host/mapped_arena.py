"""A peer's arena, mapped here: its handles at the same offsets behind addresses of our own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import NamedTuple, final

from kvarena.errors import KvArenaError
from kvarena.transfer.protocol import Region
from kvarena.transfer.same_host.errors import HandleImportError, WireError
from kvarena.transfer.same_host.intervals import Intervals
from kvarena.transfer.same_host.memory import MemoryDriver
from kvarena.transfer.same_host.wire import Packet, field, rows

__all__ = ["MappedArena"]

_log = logging.getLogger(__name__)

# What one update may name, and what may be mapped at one time: a peer that says more is not one of ours.
_MAX_HANDLES = 4096
_MAX_ROWS = 16384


@final
class MappedArena:
    """Mappings of a peer's handles, and which of its bytes may be written. The caller locks.

    Parameters
    ----------
    driver : MemoryDriver
        Of our device: mapping gives that device access.
    peer : str
        For messages.
    peer_base, reserved_bytes : int
        The peer's own address of its arena, and its length.

    Raises
    ------
    WireError
        No arena lies there.
    KvArenaError
        The driver has no addresses for it.
    """

    def __init__(self, driver: MemoryDriver, peer: str, peer_base: int, reserved_bytes: int) -> None:
        if peer_base + reserved_bytes >= 1 << 63:
            raise WireError(f"{reserved_bytes} bytes at {peer_base:#x} end past 2**63")
        self._driver = driver
        self._peer = peer
        self.peer_base = peer_base
        self._reserved_bytes = reserved_bytes
        self.base = driver.reserve(reserved_bytes)
        self._maps: dict[int, tuple[int, int, int]] = {}
        self._staged = _Staged()
        self._regions: list[Region] = []
        self.intervals = Intervals()
        self.epoch = -1

    @property
    def shift(self) -> int:
        """What to add to a peer's address to reach the same byte here."""
        return self.base - self.peer_base

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the peer's memory that are mapped here."""
        return sum(nbytes for _, nbytes, _ in self._maps.values())

    def stage(self, packet: Packet) -> bool:
        """Take note of one EXPORT packet, and own its descriptors; whether more of the update follows.

        Raises
        ------
        WireError
            The packet contradicts itself; its descriptors stay the caller's.
        """
        body = packet.body
        epoch, more = field(body, "epoch", int), field(body, "more", bool)
        added, dropped, regions = rows(body, "add", 3), rows(body, "drop", 1), rows(body, "regions", 2)
        if len(added) != len(packet.fds):
            raise WireError(f"{len(packet.fds)} descriptors for {len(added)} handles")
        staged = self._staged
        rows_so_far = len(staged.dropped) + len(staged.regions) + len(dropped) + len(regions)
        handles = len(self._maps) + len(staged.added) + len(added)
        if rows_so_far > _MAX_ROWS or handles > _MAX_HANDLES:
            raise WireError(
                f"an update of {rows_so_far} rows and {handles} handles: more than {_MAX_ROWS} "
                f"and {_MAX_HANDLES}"
            )
        staged.dropped += [serial for (serial,) in dropped]
        staged.added += [
            _Added(row[0], row[1], row[2], fd) for row, fd in zip(added, packet.fds, strict=True)
        ]
        staged.regions += [Region(self.peer_base + offset, nbytes) for offset, nbytes in regions]
        staged.epoch = epoch
        return more

    def commit(self, drain: Callable[[], None]) -> None:
        """Do what the staged packets say.

        Parameters
        ----------
        drain : callable
            Waits until nothing is being copied to the peer; called before anything is unmapped, or a
            region ceases to be one. Whether that is needed is decided here, not by the peer.

        Raises
        ------
        WireError
            They contradict themselves, or the state here.
        HandleImportError
            A handle cannot be mapped. After either error the arena must be closed.
        """
        staged, self._staged = self._staged, _Staged()
        after = Intervals(staged.regions)
        try:
            if staged.dropped or not all(
                after.covers(region.address, region.end) for region in self._regions
            ):
                drain()
            for serial in staged.dropped:
                if serial not in self._maps:
                    raise WireError(f"handle {serial} was never exported")
                self._unmap(serial)
            for added in staged.added:
                self._map(added)
        finally:
            staged.close()
        # Regions count only where memory is mapped: a peer that says more must not make us fault.
        mapped = Intervals(
            Region(self.peer_base + offset, nbytes) for offset, nbytes, _ in self._maps.values()
        )
        for region in staged.regions:
            if not mapped.covers(region.address, region.end):
                raise WireError(f"{region.nbytes} bytes are registered where no memory was exported")
        self._regions, self.intervals = staged.regions, after
        self.epoch = staged.epoch

    def close(self) -> None:
        """Unmap everything and give the addresses back; what the driver refuses is logged."""
        self._staged.close()
        self._staged = _Staged()
        for serial in list(self._maps):
            try:
                self._unmap(serial)
            except KvArenaError:
                _log.exception("a part of %s's arena stays mapped", self._peer)
        if self.base and not self._maps:
            try:
                self._driver.release_reservation(self.base, self._reserved_bytes)
            except KvArenaError:
                _log.exception("the addresses of %s's arena stay reserved", self._peer)
        self.base = 0
        self.intervals = Intervals()

    def _map(self, added: _Added) -> None:
        serial, offset, nbytes, fd = added
        if serial in self._maps or nbytes == 0 or offset + nbytes > self._reserved_bytes:
            raise WireError(f"handle {serial} of {nbytes} bytes at offset {offset} does not fit")
        try:
            handle = self._driver.import_fd(fd, nbytes)
            try:
                self._driver.map(self.base + offset, nbytes, handle)
            except BaseException:
                self._driver.release(handle)
                raise
        except KvArenaError as error:
            raise HandleImportError(self._peer, offset, nbytes, str(error)) from error
        self._maps[serial] = (offset, nbytes, handle)

    def _unmap(self, serial: int) -> None:
        offset, nbytes, handle = self._maps[serial]
        self._driver.unmap(self.base + offset, nbytes)
        del self._maps[serial]
        self._driver.release(handle)


class _Added(NamedTuple):
    serial: int
    offset: int
    nbytes: int
    fd: int


@dataclass
class _Staged:
    """An update that has not been told whole yet."""

    added: list[_Added] = dataclass_field(default_factory=list)
    dropped: list[int] = dataclass_field(default_factory=list)
    regions: list[Region] = dataclass_field(default_factory=list)
    epoch: int = 0

    def close(self) -> None:
        for added in self.added:
            os.close(added.fd)
