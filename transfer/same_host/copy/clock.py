"""What moves bytes between two mapped arenas, and how one learns that it has."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvarena.transfer.protocol import Int64

__all__ = ["Clock", "Copier", "Signal", "await_clock"]

# A waiter looks without letting anyone else run for this long: nearly all transfers end within it, and
# other threads of the process may have to wait longer than this for the interpreter anyway (5 ms).
_SPIN_SECONDS = 150e-6
_LOOKS = 16
# Then it offers its turn before each look, and from here on it sleeps, for a part of what it has waited
# already: the shortest sleep takes some 55 us here and there, so sooner would mean late.
_YIELD_SECONDS = 2e-3
_LATENESS = 1 / 64
_LONGEST_NAP = 1e-3

# Through ctypes it lets go of the interpreter, which `os.sched_yield` does not before Python 3.13.
_yield = ctypes.CDLL(None).sched_yield


class Clock(Protocol):
    """Numbers things in the order in which they end: number n has ended when n or more is shown."""

    def has_ended(self, number: int) -> bool:
        """Whether it has; never blocks. Raises `RuntimeError` if it has failed."""
        ...

    def wait(self, number: int, timeout: float | None) -> bool:
        """Block until it has ended, or for `timeout` seconds; whether it has. Raises as `has_ended`."""
        ...


Signal: TypeAlias = Callable[[], tuple[int, int, Callable[[int], None]]]
"""What a copy leaves in memory that another process watches, when its bytes are there.

Called once, when the copy has been started and nothing can stop it any more, it answers: the address of 8
bytes (see `Copier.adopt`), the value that is stored there, and what is called with that value before, if
the copy fails all the same and those behind it go on. It must not raise.
"""


class Copier(Clock, Protocol):
    """Starts copies between addresses that are mapped here; checks nothing, and keeps their order.

    It is the clock of its copies: starting one answers the copy's number.
    """

    @property
    def ended(self) -> int:
        """The last copy that has ended."""
        ...

    def copy_pages(
        self,
        src_base: int,
        dst_base: int,
        src_pages: Int64,
        dst_pages: Int64,
        page_bytes: int,
        signal: Signal | None = None,
        after: int | None = None,
    ) -> int:
        """Page ``src_pages[i]`` onto ``dst_pages[i]``, all of `page_bytes`.

        Parameters
        ----------
        signal : Signal, optional
            Given when all of them are there.
        after : int, optional
            A CUDA stream whose work so far comes first.
        """
        ...

    def copy_spans(
        self,
        src: Int64,
        dst: Int64,
        lengths: Int64,
        signal: Signal | None = None,
        after: int | None = None,
    ) -> int:
        """``lengths[i]`` bytes from address ``src[i]`` to ``dst[i]``."""
        ...

    def prepare(self, page_bytes: int) -> None:
        """Do now what the first copy of such pages would have to wait for."""
        ...

    def identity(self) -> str:
        """Which device copies run on; equal for two processes that use the same one."""
        ...

    def can_reach(self, identity: str) -> bool | None:
        """Whether our device can map memory of that one; None: not known before it is tried."""
        ...

    def adopt(self, address: int, nbytes: int) -> int:
        """Let copies signal into this memory of the process; its address for a `Signal`. `RuntimeError`."""
        ...

    def disown(self, address: int) -> None:
        """Undo `adopt`; nothing signals there any more."""
        ...

    def fault(self) -> str | None:
        """Why no copy will ever end again, if that is so."""
        ...

    def close(self) -> None:
        """End what was started, then let go; a second call does nothing."""
        ...


def await_clock(has_ended: Callable[[int], bool], number: int, timeout: float | None) -> bool:
    """`Clock.wait` by looking: at first without a pause, then more and more rarely."""
    if has_ended(number):
        return True
    now = time.perf_counter
    start = now()
    spun = start + (_SPIN_SECONDS if timeout is None else min(_SPIN_SECONDS, timeout))
    while now() < spun:
        for _ in range(_LOOKS):
            if has_ended(number):
                return True
    while not has_ended(number):
        waited = now() - start
        if timeout is not None and waited >= timeout:
            return False
        if waited < _YIELD_SECONDS:
            _yield()
        else:
            time.sleep(min(waited * _LATENESS, _LONGEST_NAP))
    return True
