"""The record of every handle that an arena holds: the only truth about what is mapped and what is held."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

from kvarena.pool.errors import ArenaStateError, MappingLeftError, UnknownHandleError
from kvarena.pool.transaction import Transaction

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["HandleRecord", "Handles", "failure_of"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class HandleRecord:
    """What is held for one handle; never rebuilt from an address and a size."""

    offset: int
    nbytes: int
    handle: int = 0
    held: bool = False
    mapped: bool = False
    accessible: bool = False
    """Not so while `mapped` only where the driver's own undo failed."""


@final
class Handles:
    """Handles mapped from an address on, and those that could not be let go yet.

    `swap`, `append` and `shrink` are transactions. When one raises and its
    undo failed as well, or when a handle was unmapped by someone else,
    `intact` turns false: what is recorded is then still what is there, but no
    longer a backed prefix.
    """

    def __init__(self, driver: Driver, base: int) -> None:
        self.live: list[HandleRecord] = []
        self.intact = True
        self._stale: list[HandleRecord] = []
        self._driver = driver
        self._base = base

    def swap(self, nbytes: int) -> None:
        """One new handle of zeros in place of all that are there."""
        self._drop_stale()
        old, new = self.live, HandleRecord(0, nbytes)
        try:
            with Transaction() as transaction:
                self._create(new, transaction)
                self._unmap_all(old, transaction)
                self._map_zeroed(new, transaction)
        except BaseException:
            self._settle(new)
            raise
        self.live = [new]
        self._let_go(old)

    def append(self, sizes: Sequence[int]) -> None:
        """New handles of zeros, of these sizes, behind those that are there."""
        self._drop_stale()
        end = self.backed_bytes
        new = []
        for nbytes in sizes:
            new.append(HandleRecord(end, nbytes))
            end += nbytes
        try:
            with Transaction() as transaction:
                for record in new:
                    self._create(record, transaction)
                    self._map_zeroed(record, transaction)
        except BaseException:
            self._settle(*new)
            raise
        self.live += new

    def shrink(self, offset: int) -> None:
        """Let go of the handles from `offset` on."""
        gone = [record for record in self.live if record.offset >= offset]
        try:
            with Transaction() as transaction:
                self._unmap_all(gone, transaction)
        except BaseException:
            self._settle()
            raise
        self.live = [record for record in self.live if record.offset < offset]
        self._let_go(gone)

    def close(self) -> list[Exception]:
        """Let go of everything that the driver allows, and return its failures; call again to go on."""
        self.intact = False
        self._stale += self.live
        self.live = []
        return self._drop_stale()

    def require_mapped(self) -> None:
        """See that every handle is still mapped where it is recorded.

        Raises
        ------
        ArenaStateError
            One is not: something else has unmapped it. `intact` is false from then on.
        """
        for record in self.live:
            if not self._driver.is_mapped(self._base + record.offset, record.nbytes):
                record.mapped = record.accessible = self.intact = False
                raise ArenaStateError(
                    f"The handle of {record.nbytes} bytes at offset {record.offset} "
                    f"({self._base + record.offset:#x}) is not mapped any more, though the arena kept it.",
                    fix="Find what unmapped it; call close() and make a new arena.",
                )

    @property
    def backed_bytes(self) -> int:
        """Bytes from the base that have memory; asked for by every growth, so it builds no list."""
        if self.intact and self.live:
            return self.live[-1].offset + self.live[-1].nbytes
        return sum(record.nbytes for record in self.live if record.accessible)

    @property
    def maps_anything(self) -> bool:
        """Whether a handle is still mapped, be it a stale one."""
        return any(record.mapped for record in (*self.live, *self._stale))

    def _create(self, record: HandleRecord, transaction: Transaction) -> None:
        record.handle = self._driver.create(record.nbytes)
        record.held = True
        transaction.undo(partial(self._release, record), "releasing the new handle")

    def _map_zeroed(self, record: HandleRecord, transaction: Transaction) -> None:
        self._map(record)
        transaction.undo(partial(self._unmap, record), "unmapping the new handle")
        if not self._driver.fresh_is_zero:
            self._driver.zero(self._base + record.offset, record.nbytes)

    def _unmap_all(self, records: Sequence[HandleRecord], transaction: Transaction) -> None:
        for record in reversed(records):
            self._unmap(record)
            transaction.undo(partial(self._map, record), "mapping an old handle again")

    def _map(self, record: HandleRecord) -> None:
        try:
            self._driver.map(self._base + record.offset, record.nbytes, record.handle)
        except MappingLeftError:
            record.mapped = True
            raise
        record.mapped = record.accessible = True

    def _unmap(self, record: HandleRecord) -> None:
        self._driver.unmap(self._base + record.offset, record.nbytes)
        record.mapped = record.accessible = False

    def _release(self, record: HandleRecord) -> None:
        self._driver.release(record.handle)
        record.held = False

    def _settle(self, *new: HandleRecord) -> None:
        """After a failure and its undo: keep what could not be let go, and see whether all is as before."""
        self._stale += [record for record in new if record.mapped or record.held]
        self.intact = all(record.accessible for record in self.live) and not any(
            record.mapped for record in new
        )

    def _let_go(self, records: Sequence[HandleRecord]) -> None:
        """Release handles that are no longer used.

        The new state stands by now, and there is no way back once one of
        several is gone: a failure is logged, and release is tried again later.
        """
        for record in records:
            for error in failure_of(partial(self._release, record)):
                _log.warning("%d bytes stay taken until they can be released: %s", record.nbytes, error)
                self._stale.append(record)

    def _drop_stale(self) -> list[Exception]:
        failures = []
        # The last first, so that what stays after a failure is still a prefix.
        for record in reversed(list(self._stale)):
            failures += self._drop(record)
        return failures

    def _drop(self, record: HandleRecord) -> list[Exception]:
        """Let go of as much of one stale record as the driver allows, and forget it once all is gone.

        What something else has let go before is gone as well: it must not be tried for ever.
        """
        failures = []
        if record.mapped:
            failures += failure_of(partial(self._unmap_if_mapped, record))
        if record.held:
            failures += failure_of(partial(self._release_if_held, record))
        if not failures:
            self._stale.remove(record)
        return failures

    def _unmap_if_mapped(self, record: HandleRecord) -> None:
        if self._driver.is_mapped(self._base + record.offset, record.nbytes):
            self._unmap(record)
        record.mapped = record.accessible = False

    def _release_if_held(self, record: HandleRecord) -> None:
        try:
            self._release(record)
        except UnknownHandleError as error:
            _log.warning("A handle of %d bytes was released by something else: %s", record.nbytes, error)
            record.held = False


def failure_of(step: Callable[[], object]) -> list[Exception]:
    """What a step raised, for those who must finish other steps before they raise it."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - every caller raises or logs it
        return [error]
    return []
