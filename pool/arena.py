"""One range of addresses that is backed with memory from its start, and never moves."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from kvarena.pool._counts import as_count
from kvarena.pool._handles import Handles, failure_of
from kvarena.pool.errors import ArenaStateError
from kvarena.pool.transaction import Transaction, add_note

if TYPE_CHECKING:
    import torch
    from kvarena.pool.driver import Driver

__all__ = ["Arena", "ArenaState", "Mapping"]


class ArenaState(str, enum.Enum):
    """Where an arena stands."""

    RESERVED = "reserved"
    """Addresses only."""
    BACKED = "backed"
    """``[0, backed_bytes)`` has memory."""
    BROKEN = "broken"
    """What is mapped is not what should be: the driver failed while undoing a failure, or something else
    unmapped a handle. Nothing but `Arena.close` is possible."""
    CLOSED = "closed"
    """Nothing is left."""


class Mapping(NamedTuple):
    """One handle and where it is mapped."""

    offset: int
    """Bytes from the arena's base."""
    nbytes: int
    handle: int

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.nbytes


@final
class Arena:
    """A reservation and the handles that back its prefix.

    Every method that changes something is a transaction: if it raises, the
    arena holds the handles, and they the contents, that it held before; or,
    where that cannot be, it is `BROKEN`, and `close` lets go of what is left.
    Each also sees first that every handle is still mapped. Not thread-safe.

    Parameters
    ----------
    driver : Driver
        The device's virtual memory.
    reserved_bytes : int
        Bytes of addresses to set aside, rounded up to the granularity.

    Raises
    ------
    ArenaStateError
        `reserved_bytes` is not a byte count that can be reserved.
    DriverError
        The addresses cannot be had.
    """

    def __init__(self, driver: Driver, reserved_bytes: int) -> None:
        size = _rounded(reserved_bytes, driver.granularity)
        if not 0 < size <= sys.maxsize:
            raise ArenaStateError(
                f"An arena of {reserved_bytes!r} bytes cannot be reserved.",
                fix=f"Reserve at least one byte, and at most {sys.maxsize}.",
            )
        self.driver = driver
        self.reserved_bytes = size
        self.base = driver.reserve(self.reserved_bytes)
        self.state = ArenaState.RESERVED
        self._handles = Handles(driver, self.base)
        self._holds_addresses = True
        self._last_shrink: tuple[int, ...] = ()  # bytes of each handle that it released
        self._tensor: torch.Tensor | None = None

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """The handles that can be accessed, in the order of their offsets."""
        return tuple(Mapping(r.offset, r.nbytes, r.handle) for r in self._handles.live if r.accessible)

    @property
    def backed_bytes(self) -> int:
        """Bytes from the base that have memory; a multiple of the granularity."""
        return self._handles.backed_bytes

    @property
    def seams(self) -> tuple[int, ...]:
        """The addresses at which two handles meet."""
        return tuple(self.base + mapping.offset for mapping in self.mappings[1:])

    @property
    def tensor(self) -> torch.Tensor:
        """A uint8 tensor over the whole reservation, made once.

        It owns nothing: touching bytes beyond `backed_bytes`, or any after
        `close`, faults.

        Raises
        ------
        ArenaStateError
            Nothing is backed yet: CUDA knows an address only once it is mapped.
        """
        if self._tensor is None:
            self._require(ArenaState.BACKED, "make a tensor")
            self._tensor = self.driver.tensor(self.base, self.reserved_bytes)
        return self._tensor

    def back(self, nbytes: int) -> None:
        """Back ``[0, nbytes)`` with one handle of zeros, in place of all handles that are there.

        The first call backs the sink; a later one swaps it. The contents are
        not carried over. The new handle is made before the old ones go, so
        the device must have `nbytes` free beside them; if anything fails, the
        old ones are mapped again with their contents.

        Parameters
        ----------
        nbytes : int
            Bytes from the base, rounded up to the granularity.

        Raises
        ------
        ArenaStateError
            The arena is closed or broken, or `nbytes` is not within the reservation.
        OutOfMemoryError
            The device has not that much.
        DriverError
            The driver failed.
        """
        self._require_open("back")
        size = self._checked_size(nbytes)
        with self._watched():
            self._handles.swap(size)
        self._last_shrink = ()
        self.state = ArenaState.BACKED

    def grow(self, nbytes: int) -> None:
        """Back ``[0, nbytes)`` by adding one handle of zeros behind those that are there.

        Parameters
        ----------
        nbytes : int
            Bytes from the base, rounded up to the granularity; nothing
            happens if they are backed already.

        Raises
        ------
        ArenaStateError
            Nothing is backed, the arena is closed or broken, or `nbytes` is
            not within the reservation.
        OutOfMemoryError
            The device has not that much.
        DriverError
            The driver failed.
        """
        self._require(ArenaState.BACKED, "grow")
        size = self._checked_size(nbytes)
        with self._watched():
            missing = size - self.backed_bytes
            if missing <= 0:
                return
            self._handles.append([missing])
        self._last_shrink = ()

    def shrink(self, nbytes: int) -> None:
        """Keep only ``[0, nbytes)``: release the handles behind it.

        A part of a handle cannot be released (CUDA refuses it), nor can the
        first handle, which holds the sink.

        Parameters
        ----------
        nbytes : int
            Bytes from the base; the end of a handle other than the last.

        Raises
        ------
        ArenaStateError
            The arena is not backed, or `nbytes` is not the end of such a
            handle; the error names the nearest that are.
        DriverError
            The driver failed.
        """
        size = self.check_shrink(nbytes)
        gone = tuple(mapping.nbytes for mapping in self.mappings if mapping.offset >= size)
        with self._watched():
            self._handles.shrink(size)
        self._last_shrink = gone

    def revert_shrink(self) -> None:
        """Take the last `shrink` back: handles of the same sizes again, filled with zeros.

        For whoever composes it with steps that may fail after it. `grow` would
        make one handle of them all, and sizes between them would be refused
        from then on.

        Raises
        ------
        ArenaStateError
            The arena is closed or broken, or no `shrink` is left to take back:
            every other change of its size forgets it.
        OutOfMemoryError, DriverError
            The device refused; nothing was taken.
        """
        self._require(ArenaState.BACKED, "take a shrink back")
        if not self._last_shrink:
            raise ArenaStateError(
                f"The arena's {self.backed_bytes} bytes were not shrunk last; there is nothing to take back.",
                fix="Call it right after shrink(), or use grow().",
            )
        with self._watched():
            self._handles.append(self._last_shrink)
        self._last_shrink = ()

    def check_shrink(self, nbytes: int) -> int:
        """`nbytes`, if `shrink` would take it; raises what that raises, and changes nothing."""
        self._require(ArenaState.BACKED, "shrink")
        ends = [mapping.end for mapping in self.mappings]
        size = as_count(nbytes) or 0
        if size not in ends[:-1]:
            raise ArenaStateError(
                f"{self.backed_bytes} bytes are backed by {len(ends)} handles and cannot shrink to "
                f"{nbytes!r}: memory is released in whole handles.",
                fix=_nearest(size, ends[:-1]),
            )
        return size

    def shrink_to_zero(self) -> None:
        """Release every handle, the sink's too; only the addresses stay.

        Raises
        ------
        ArenaStateError
            The arena is not backed.
        DriverError
            The driver failed.
        """
        self._require(ArenaState.BACKED, "shrink")
        with self._watched():
            self._handles.shrink(0)
        self._last_shrink = ()
        self.state = ArenaState.RESERVED

    def export_fds(self) -> tuple[int, ...]:
        """New file descriptors of all handles, in the order of `mappings`; the caller closes them.

        Raises
        ------
        ArenaStateError
            The arena is closed or broken.
        DriverError
            One cannot be exported; those that were made are closed again.
        """
        self._require_open("export its handles")
        fds: list[int] = []
        with self._watched(), Transaction() as transaction:
            for mapping in self.mappings:
                fd = self.driver.export_fd(mapping.handle)
                fds.append(fd)
                transaction.undo(partial(os.close, fd), "closing a descriptor")
        return tuple(fds)

    def close(self) -> None:
        """Unmap and release everything; a second call does nothing, or finishes what failed.

        Tensors over the arena stay, but touching them faults.

        Raises
        ------
        DriverError
            The first failure, with the others as notes. Everything else has
            been let go; call again to finish.
        """
        if self.state is ArenaState.CLOSED:
            return
        self.state = ArenaState.BROKEN  # until all is gone
        failures = self._handles.close()
        if self._holds_addresses and not self._handles.maps_anything:
            failures += failure_of(self._release_reservation)
        if failures:
            for second in failures[1:]:
                add_note(failures[0], f"while closing, this failed too: {second}")
            raise failures[0]
        self._tensor = None
        self.state = ArenaState.CLOSED

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release_reservation(self) -> None:
        self.driver.release_reservation(self.base, self.reserved_bytes)
        self._holds_addresses = False

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Before the block, see that all is mapped; after a failure, whether it still is."""
        try:
            self._handles.require_mapped()
            yield
        except BaseException:
            if not self._handles.intact:
                self.state = ArenaState.BROKEN
            raise

    def _require(self, state: ArenaState, what: str) -> None:
        if self.state is not state:
            raise ArenaStateError(
                f"The arena is {self.state.value} and cannot {what}.", fix=_REMEDY.get(self.state, "")
            )

    def _require_open(self, what: str) -> None:
        if self.state not in (ArenaState.RESERVED, ArenaState.BACKED):
            self._require(ArenaState.BACKED, what)

    def _checked_size(self, nbytes: int) -> int:
        size = _rounded(nbytes, self.driver.granularity)
        if not 0 < size <= self.reserved_bytes:
            raise ArenaStateError(
                f"{nbytes!r} bytes cannot be backed: {self.reserved_bytes} are reserved.",
                fix=f"Ask for 1 to {self.reserved_bytes} bytes.",
            )
        return size


_REMEDY = {
    ArenaState.RESERVED: "Call back() first.",
    ArenaState.BROKEN: "Call close() and make a new one.",
    ArenaState.CLOSED: "Make a new one.",
}


def _nearest(nbytes: int, sizes: Sequence[int]) -> str:
    below = max((size for size in sizes if size <= nbytes), default=None)
    above = min((size for size in sizes if size > nbytes), default=None)
    near = [str(size) for size in (below, above) if size is not None]
    return f"Ask for {' or '.join(near)} bytes." if near else "Close the arena instead."


def _rounded(nbytes: object, granularity: int) -> int:
    """Up to whole granules; 0 for what is not a byte count."""
    return -(-(as_count(nbytes) or 0) // granularity) * granularity
