"""What moves bytes between two mapped arenas, and how one learns that it has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from kvarena.transfer._same_host_memory import MemoryDriver
from kvarena.transfer.errors import EngineUnavailable

__all__ = ["Copier", "Int64", "OnDone", "ThreadTicket", "Ticket", "make_copier"]

Int64 = npt.NDArray[np.int64]
OnDone = Callable[["BaseException | None"], None]
"""Called once, from any thread, when a copy has ended; with the error if it failed."""


class Ticket(Protocol):
    """A copy that was started."""

    def poll(self) -> bool:
        """Whether it has ended; never blocks. `OnDone` has been called when this says so."""
        ...

    def wait(self, timeout: float | None) -> bool:
        """Block until it has ended, or for `timeout` seconds; whether it has."""
        ...


class Copier(Protocol):
    """Starts copies between addresses that are mapped here; checks nothing, and keeps their order."""

    def copy_pages(
        self,
        src_base: int,
        dst_base: int,
        src_pages: Int64,
        dst_pages: Int64,
        page_bytes: int,
        on_done: OnDone,
        after: int | None = None,
    ) -> Ticket:
        """Page ``src_pages[i]`` onto ``dst_pages[i]``, all of `page_bytes`.

        Parameters
        ----------
        after : int, optional
            A CUDA stream whose work so far comes first.
        """
        ...

    def copy_spans(
        self, src: Int64, dst: Int64, lengths: Int64, on_done: OnDone, after: int | None = None
    ) -> Ticket:
        """``lengths[i]`` bytes from address ``src[i]`` to ``dst[i]``."""
        ...

    def prepare(self, page_bytes: int) -> None:
        """Do now what the first copy of such pages would have to wait for."""
        ...

    def close(self) -> None:
        """End what was started, then let go; a second call does nothing."""
        ...


class ThreadTicket:
    """A copy that another thread makes."""

    __slots__ = ("_ended", "_on_done")

    def __init__(self, on_done: OnDone) -> None:
        self._on_done = on_done
        self._ended = threading.Event()

    def end(self, error: BaseException | None) -> None:
        """Tell everyone; called by the copying thread."""
        try:
            self._on_done(error)
        finally:
            self._ended.set()

    def poll(self) -> bool:
        """See `Ticket.poll`."""
        return self._ended.is_set()

    def wait(self, timeout: float | None) -> bool:
        """See `Ticket.wait`."""
        return self._ended.wait(timeout)


def make_copier(driver: MemoryDriver, thread_name: str) -> Copier:
    """The copier for a driver's memory. Raises `EngineUnavailable`."""
    if driver.name != "cuda":
        from kvarena.transfer._copy_host import HostCopier

        return HostCopier(thread_name)
    try:
        from kvarena.transfer._copy_cuda import CudaCopier
    except ImportError as error:
        raise EngineUnavailable(
            "same-host", f"{error.name} cannot be imported ({error})", fix="Install triton and cuda-python."
        ) from error
    return CudaCopier(driver.device.index, thread_name)
