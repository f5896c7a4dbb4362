"""What tests of memory need: a driver that fails when told to, and a look for leaks.

The failing driver stacks on a real one, so what is tested is the real
thing's undo. Ready-made tests are in the ``*_contract`` modules beside this
one: derive from their classes to test a driver of your own.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, final

from kvarena.pool.errors import DriverError, MappingLeftError

if TYPE_CHECKING:
    import torch
    from kvarena.pool.driver import Driver

__all__ = ["OPS", "FailingDriver", "LeakError", "Resources", "make_driver", "mapped_within", "no_leaks"]

OPS = frozenset(
    {
        "reserve",
        "release_reservation",
        "create",
        "map",
        "unmap",
        "release",
        "export_fd",
        "import_fd",
        "free_bytes",
        "zero",
        "tensor",
    }
)
"""The driver's methods."""


@final
class FailingDriver:
    """A `Driver` that stands on another and fails at one call, or from it on.

    The call that fails does not reach the driver beneath.

    Parameters
    ----------
    driver : Driver
        What does the work.
    fail_at : int, optional
        Which of the counted calls fails, from 1. None: none does. Assign it
        anew to count from the start again.
    ops : collection of str, optional
        The methods that count, of `OPS`. None: all.
    error : Exception, optional
        What to raise; a `DriverError` with the code ``INJECTED`` by default.
    forever : bool
        Whether all counted calls from `fail_at` on fail.

    Attributes
    ----------
    calls : list of str
        Every method called, counted or not, failed or not.
    """

    def __init__(
        self,
        driver: Driver,
        fail_at: int | None = None,
        *,
        ops: Collection[str] | None = None,
        error: Exception | None = None,
        forever: bool = False,
    ) -> None:
        unknown = set(ops or ()) - OPS
        if unknown:
            raise ValueError(f"a driver has no {', '.join(sorted(unknown))}")
        self.driver = driver
        self.calls: list[str] = []
        self._ops = OPS if ops is None else frozenset(ops)
        self._error = error
        self._forever = forever
        self._reservations: dict[int, int] = {}
        self._mappings: dict[int, int] = {}
        self._handles: set[int] = set()
        self.fail_at = fail_at

    @property
    def fail_at(self) -> int | None:
        """Which counted call fails."""
        return self._fail_at

    @fail_at.setter
    def fail_at(self, number: int | None) -> None:
        self._fail_at = number
        self.counted = 0

    def outstanding(self) -> list[str]:
        """What was taken through this adaptor and not released, a line each."""
        return [
            *(f"reservation of {nbytes} bytes at {start:#x}" for start, nbytes in self._reservations.items()),
            *(f"mapping of {nbytes} bytes at {start:#x}" for start, nbytes in self._mappings.items()),
            *(f"handle {handle}" for handle in sorted(self._handles)),
        ]

    @property
    def name(self) -> str:
        """The name of the driver beneath."""
        return self.driver.name

    @property
    def device(self) -> torch.device:
        """The device of the driver beneath."""
        return self.driver.device

    @property
    def granularity(self) -> int:
        """The granularity of the driver beneath."""
        return self.driver.granularity

    @property
    def rdma_capable(self) -> bool:
        """As the driver beneath."""
        return self.driver.rdma_capable

    @property
    def fresh_is_zero(self) -> bool:
        """Always False: `zero` must be called, so that it can fail."""
        return False

    def reserve(self, nbytes: int) -> int:
        """See `Driver.reserve`."""
        self._count("reserve")
        address = self.driver.reserve(nbytes)
        self._reservations[address] = nbytes
        return address

    def release_reservation(self, address: int, nbytes: int) -> None:
        """See `Driver.release_reservation`."""
        self._count("release_reservation")
        self.driver.release_reservation(address, nbytes)
        self._reservations.pop(address, None)

    def create(self, nbytes: int) -> int:
        """See `Driver.create`."""
        self._count("create")
        handle = self.driver.create(nbytes)
        self._handles.add(handle)
        return handle

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """See `Driver.map`."""
        self._count("map")
        try:
            self.driver.map(address, nbytes, handle)
        except MappingLeftError:
            self._mappings[address] = nbytes
            raise
        self._mappings[address] = nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        """See `Driver.unmap`."""
        self._count("unmap")
        self.driver.unmap(address, nbytes)
        self._mappings.pop(address, None)

    def is_mapped(self, address: int, nbytes: int) -> bool:
        """The answer of the driver beneath; it takes nothing, so it is not counted."""
        return self.driver.is_mapped(address, nbytes)

    def release(self, handle: int) -> None:
        """See `Driver.release`."""
        self._count("release")
        self.driver.release(handle)
        self._handles.discard(handle)

    def export_fd(self, handle: int) -> int:
        """See `Driver.export_fd`."""
        self._count("export_fd")
        return self.driver.export_fd(handle)

    def import_fd(self, fd: int, nbytes: int) -> int:
        """See `Driver.import_fd`."""
        self._count("import_fd")
        handle = self.driver.import_fd(fd, nbytes)
        self._handles.add(handle)
        return handle

    def free_bytes(self) -> int:
        """See `Driver.free_bytes`."""
        self._count("free_bytes")
        return self.driver.free_bytes()

    def zero(self, address: int, nbytes: int) -> None:
        """See `Driver.zero`."""
        self._count("zero")
        self.driver.zero(address, nbytes)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See `Driver.tensor`."""
        self._count("tensor")
        return self.driver.tensor(address, nbytes)

    def _count(self, op: str) -> None:
        self.calls.append(op)
        if op not in self._ops:
            return
        self.counted += 1
        if self._fail_at is None or self.counted < self._fail_at:
            return
        if self.counted == self._fail_at or self._forever:
            raise self._error or DriverError(op, "INJECTED", f"call {self.counted}")


def make_driver(expression: str) -> Driver:
    """The driver that an expression like ``kvarena.pool.HostVmm()`` makes."""
    path, _, call = expression.partition("(")
    module, _, name = path.rpartition(".")
    made: Driver = eval(f"make({call}", {"make": getattr(importlib.import_module(module), name)})
    return made


_LOOKS = 5


class LeakError(AssertionError):
    """A block left something behind."""


class Resources:
    """What this process holds of the host: descriptors, and mapped memfds.

    Device memory is not among it: ask the driver's `free_bytes`.
    """

    def __init__(self) -> None:
        self.fds = _open_fds()
        self.memfds = [line for line in _maps() if "/memfd:kvarena" in line]

    def leaked_since(self, before: Resources) -> list[str]:
        """What is there now and was not `before`, a line each."""
        fds = [f"descriptor {fd} -> {what}" for fd, what in self.fds.items() if before.fds.get(fd) != what]
        return fds + [line for line in self.memfds if line not in before.memfds]


@contextmanager
def no_leaks() -> Iterator[None]:
    """Fail if the block leaves a descriptor or a mapped memfd behind.

    Raises
    ------
    LeakError
        Each of them is named.
    """
    before = Resources()
    yield
    for _ in range(_LOOKS):
        leaked = Resources().leaked_since(before)
        if not leaked:
            return
        # Another thread may have had a file open for a moment, a status file say; a leak is there still.
        time.sleep(0.02)
    raise LeakError("left behind: " + "; ".join(leaked))


def mapped_within(address: int, nbytes: int) -> list[str]:
    """The lines of ``/proc/self/maps`` that touch a range of addresses."""
    lines = []
    for line in _maps():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if start < address + nbytes and address < end:
            lines.append(line)
    return lines


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def _open_fds() -> dict[int, str]:
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor that listed them
            continue
    return fds
