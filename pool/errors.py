"""What can go wrong in memory, each with its numbers and what to do about it.

Errors of functions that SGLang has under the same name are also what SGLang
raises there, so that an ``except RuntimeError`` or ``except ValueError``
around such a call keeps working.
"""

from __future__ import annotations

from kvarena.errors import DescriptorLimitError, KvArenaError

__all__ = [
    "AllocatorError",
    "ArenaStateError",
    "DescriptorLimitError",
    "DriverError",
    "DriverUnavailableError",
    "LayoutError",
    "MappingLeftError",
    "OutOfMemoryError",
    "PoolSizeError",
    "PoolStateError",
    "UnknownHandleError",
]


class DriverError(KvArenaError, RuntimeError):
    """A call to the device's virtual memory failed.

    Parameters
    ----------
    op : str
        The operation, by the name that the driver itself uses (``cuMemMap``, ``mmap``).
    code : str
        The driver's own name for the failure (``CUDA_ERROR_INVALID_VALUE``, ``EINVAL``).
    detail : str, optional
        With which sizes or addresses.
    fix : str, optional
        What to do about it.
    """

    def __init__(self, op: str, code: str, detail: str = "", *, fix: str = "") -> None:
        super().__init__(f"{op} failed with {code}{': ' if detail else ''}{detail}.", fix=fix)
        self.op = op
        self.code = code
        self.detail = detail


class DriverUnavailableError(DriverError):
    """There is no such device or driver on this machine, or it lacks what an arena needs."""


class MappingLeftError(DriverError):
    """Mapping a handle failed, and so did the driver's own undo: it is mapped, but cannot be accessed.

    Whoever called `Driver.map` must still call `Driver.unmap`, sooner or later.
    """


class UnknownHandleError(DriverError):
    """There is no such handle: it was never made here, or was released before."""


class OutOfMemoryError(DriverError):
    """The device has less memory than was asked for; nothing was taken.

    Parameters
    ----------
    op, code : str
        As in `DriverError`.
    requested : int
        Bytes asked for.
    free : int
        Bytes that were free.
    """

    def __init__(self, op: str, code: str, *, requested: int, free: int, fix: str = "") -> None:
        super().__init__(
            op,
            code,
            f"{requested} bytes were asked for and {free} are free ({requested - free} too few)",
            fix=fix or "Ask for a smaller pool, or free memory on the device.",
        )
        self.requested = requested
        self.free = free


class ArenaStateError(KvArenaError, RuntimeError):
    """The arena cannot do this in the state that it is in, or with this size."""


class LayoutError(KvArenaError, ValueError):
    """A sub-pool's description, or the set of them, cannot be laid out."""


class PoolSizeError(KvArenaError, ValueError, RuntimeError):
    """A pool cannot have this size; it is unchanged.

    SGLang's ``finalize_backing`` and ``resize`` raise `ValueError` for a
    missing byte count and `RuntimeError` for one that is too small or not the
    pool's: this is both.

    Parameters
    ----------
    what : str
        What was asked for.
    requested : int or None
        Bytes asked for; None: what was given is not a count.
    minimum, maximum : int
        Bytes: the sizes that would have been accepted.
    """

    def __init__(
        self, what: str, *, requested: int | None, minimum: int, maximum: int, fix: str = ""
    ) -> None:
        super().__init__(what, fix=fix)
        self.requested = requested
        self.minimum = minimum
        self.maximum = maximum


class PoolStateError(KvArenaError, RuntimeError):
    """The pool cannot do this in the state that it is in; it is unchanged."""


class AllocatorError(KvArenaError, RuntimeError):
    """An allocator was asked for something that would corrupt it; it is unchanged."""
