"""Copies between host arenas: memmove over runs that are as long as they get, in a thread of its own."""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.copy.clock import Signal, await_clock

__all__ = ["HostCopier"]

_log = logging.getLogger(__name__)

# Below this many bytes a run, one gather-scatter in numpy costs less than a call for each run.
_SMALL_RUN = 2048

_Signalled: TypeAlias = tuple[int, int, Callable[[int], None]]
_Job: TypeAlias = tuple[Callable[[], None], int, "_Signalled | None"]


@final
class HostCopier:
    """A `Copier` over the host's memory."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._ended = 0
        self._failures: dict[int, str] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> int:
        """See `Copier.ended`."""
        return self._ended

    def has_ended(self, number: int) -> bool:
        """See `Clock.has_ended`."""
        if self._ended < number:
            return False
        if self._failures and number in self._failures:
            raise RuntimeError(self._failures[number])
        return True

    def wait(self, number: int, timeout: float | None) -> bool:
        """See `Clock.wait`."""
        return await_clock(self.has_ended, number, timeout)

    def prepare(self, page_bytes: int) -> None:
        """See `Copier.prepare`; there is nothing to do."""

    def identity(self) -> str:
        """See `Copier.identity`."""
        return "host"

    def can_reach(self, identity: str) -> bool | None:
        """See `Copier.can_reach`."""
        return identity == "host"

    def adopt(self, address: int, nbytes: int) -> int:
        """See `Copier.adopt`; a thread of the process can write there as it is."""
        return address

    def disown(self, address: int) -> None:
        """See `Copier.disown`."""

    def fault(self) -> str | None:
        """See `Copier.fault`."""
        return None

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
        """See `Copier.copy_pages`; host memory has no streams, so `after` is not needed."""
        src, dst = src_pages.copy(), dst_pages.copy()
        return self._start(lambda: _move_pages(src_base, dst_base, src, dst, page_bytes), signal)

    def copy_spans(
        self,
        src: Int64,
        dst: Int64,
        lengths: Int64,
        signal: Signal | None = None,
        after: int | None = None,
    ) -> int:
        """See `Copier.copy_spans`."""
        src, dst, lengths = src.copy(), dst.copy(), lengths.copy()  # the caller's again when this returns
        return self._start(lambda: _move_runs(*_runs(src, dst, lengths)), signal)

    def close(self) -> None:
        """See `Copier.close`."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _start(self, work: Callable[[], None], signal: Signal | None) -> int:
        with self._lock:
            self._started += 1
            self._queue.put((work, self._started, None if signal is None else signal()))
            return self._started

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            work, number, signal = job
            try:
                work()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
                self._fail(number, str(error), signal)
            if signal is not None:
                ctypes.c_uint64.from_address(signal[0]).value = signal[1]
            self._ended = number

    def _fail(self, number: int, why: str, signal: _Signalled | None) -> None:
        self._failures[number] = why
        try:
            if signal is not None:
                signal[2](signal[1])
        except Exception:  # noqa: BLE001 - a thread that serves others must live on
            _log.exception("a failed copy could not be reported")


def _move_pages(src_base: int, dst_base: int, src: Int64, dst: Int64, page_bytes: int) -> None:
    if not src.size:
        return
    starts, count = _page_runs(src, dst)
    if src.size * page_bytes >= _SMALL_RUN * starts.size:
        _move_runs(
            src_base + src[starts] * page_bytes, dst_base + dst[starts] * page_bytes, count * page_bytes
        )
        return
    source, target = (
        _rows(src_base, int(src.max()) + 1, page_bytes),
        _rows(dst_base, int(dst.max()) + 1, page_bytes),
    )
    target[dst] = source[src]


def _page_runs(src: Int64, dst: Int64) -> tuple[Int64, Int64]:
    """Where each run of pages that follow one another on both sides starts, and how long it is."""
    breaks = (np.diff(src) != 1) | (np.diff(dst) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return starts, np.diff(np.append(starts, src.size))


def _runs(src: Int64, dst: Int64, lengths: Int64) -> tuple[Int64, Int64, Int64]:
    """The same copies with neighbours joined."""
    if src.size < 2:
        return src, dst, lengths
    breaks = (src[1:] != src[:-1] + lengths[:-1]) | (dst[1:] != dst[:-1] + lengths[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return src[starts], dst[starts], np.add.reduceat(lengths, starts)


def _move_runs(src: Int64, dst: Int64, lengths: Int64) -> None:
    move = ctypes.memmove  # lets go of the interpreter lock while it copies
    for source, target, nbytes in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
        move(target, source, nbytes)


def _rows(base: int, count: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """A view of memory, a page a row; only the rows that are indexed are touched."""
    span = memoryview((ctypes.c_uint8 * (count * nbytes)).from_address(base))
    return np.frombuffer(span, np.uint8).reshape(count, nbytes)
