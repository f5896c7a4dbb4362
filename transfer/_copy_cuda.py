"""Copies between mapped arenas on CUDA: one gather-scatter kernel, on a stream of its own.

The kernel reads its page ids straight from pinned host memory, so a copy is a single launch: no
upload goes before it, and nothing waits on the host.
"""

from __future__ import annotations

import threading
from typing import Any, final

import numpy as np
from cuda.bindings import driver as cu
from kvarena.transfer._copy import Int64, OnDone, Ticket
from kvarena.transfer._copy_flight import SLOT_WORDS, CudaTicket, Reporter, Slots
from kvarena.transfer._copy_kernel import Tuning, compile_pages, compile_spans
from kvarena.transfer._copy_launch import Device, Launcher, check

__all__ = ["CudaCopier"]

# From this many bytes a run on, the driver's own copy is as fast as the kernel, and no table is needed.
_LARGE_RUN = 8 << 20


@final
class CudaCopier:
    """A `Copier` on one GPU; what it reads and writes is mapped for that GPU.

    Parameters
    ----------
    index : int
        The device.
    name : str
        Of the thread that reports completions nobody waits for.
    tuning : Tuning, optional
        How copies are cut.
    """

    def __init__(self, index: int, name: str, tuning: Tuning | None = None) -> None:
        self._device = Device(index)
        self._tuning = tuning or Tuning()
        self._lock = threading.Lock()
        self._launchers: dict[tuple[int, bool], Launcher] = {}
        self._slots = Slots(self._device)
        self._events: list[Any] = []
        self._reporter = Reporter(self._device, name)
        self._closed = False

    def prepare(self, page_bytes: int) -> None:
        """Compile for pages of this size now instead of in the first transfer."""
        with self._lock, self._device.current():
            self._launcher(page_bytes, True)
            self._launcher(0, True)

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
        """See `Copier.copy_pages`."""
        with self._lock, self._device.current():
            try:
                return self._pages(src_base, dst_base, src_pages, dst_pages, page_bytes, on_done, after)
            except RuntimeError:
                self._stop()
                raise

    def copy_spans(
        self, src: Int64, dst: Int64, lengths: Int64, on_done: OnDone, after: int | None = None
    ) -> Ticket:
        """See `Copier.copy_spans`."""
        with self._lock, self._device.current():
            try:
                return self._spans(src, dst, lengths, on_done, after)
            except RuntimeError:
                self._stop()
                raise

    def close(self) -> None:
        """See `Copier.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._reporter.close()
        with self._device.current():
            cu.cuStreamSynchronize(self._device.stream)
            for event in self._events:
                cu.cuEventDestroy(event)
            for launcher in self._launchers.values():
                launcher.close()
        self._slots.close()
        self._device.close()

    def _pages(
        self,
        src_base: int,
        dst_base: int,
        src_pages: Int64,
        dst_pages: Int64,
        page_bytes: int,
        on_done: OnDone,
        after: int | None,
    ) -> Ticket:
        self._follow(after)
        launcher = self._launcher(page_bytes, (src_base | dst_base) % 16 == 0)
        spans = -(-page_bytes // launcher.span_bytes)
        for start in range(0, src_pages.size, SLOT_WORDS // 2):
            count = min(SLOT_WORDS // 2, src_pages.size - start)
            table, address = self._slots.take()
            table[0 : 2 * count : 2] = src_pages[start : start + count]
            table[1 : 2 * count : 2] = dst_pages[start : start + count]
            launcher.launch(count * spans, self._device.stream, src_base, dst_base, address)
        return self._record(on_done)

    def _spans(self, src: Int64, dst: Int64, lengths: Int64, on_done: OnDone, after: int | None) -> Ticket:
        self._follow(after)
        large = lengths >= _LARGE_RUN
        for source, target, nbytes in np.stack((src, dst, lengths), axis=1)[large].tolist():
            check(cu.cuMemcpyAsync(target, source, nbytes, self._device.stream), "cuMemcpyAsync")
        if not large.all():
            self._small_spans(src[~large], dst[~large], lengths[~large])
        return self._record(on_done)

    def _small_spans(self, src: Int64, dst: Int64, lengths: Int64) -> None:
        launcher = self._launcher(0, int(np.bitwise_or.reduce(src | dst | lengths)) % 16 == 0)
        rows = _cut(src, dst, lengths, launcher.span_bytes)
        rows[:, 2] //= launcher.kernel.word_bytes
        step = SLOT_WORDS // 3
        for start in range(0, len(rows), step):
            batch = rows[start : start + step]
            table, address = self._slots.take()
            table[: batch.size] = batch.ravel()
            launcher.launch(len(batch), self._device.stream, address)

    def _launcher(self, page_bytes: int, aligned: bool) -> Launcher:
        """The kernel for pages of this size; 0: the one for spans."""
        launcher = self._launchers.get((page_bytes, aligned))
        if launcher is None:
            capability = self._device.capability
            if page_bytes:
                launcher = Launcher(compile_pages(capability, page_bytes, aligned, self._tuning), 3)
            else:
                launcher = Launcher(compile_spans(capability, aligned, self._tuning), 1)
            self._launchers[page_bytes, aligned] = launcher
        return launcher

    def _follow(self, after: int | None) -> None:
        """Let our stream wait for what another has been given so far."""
        if after is None:
            return
        event = self._event()
        check(cu.cuEventRecord(event, after), "cuEventRecord")
        check(cu.cuStreamWaitEvent(self._device.stream, event, 0), "cuStreamWaitEvent")
        self._events.append(event)  # the wait holds what was recorded; recording anew does not change it

    def _stop(self) -> None:
        """A copy failed half-way and has no ticket: wait until what was started of it has ended."""
        cu.cuStreamSynchronize(self._device.stream)
        self._slots.used_by(None)

    def _record(self, on_done: OnDone) -> Ticket:
        event = self._event()
        check(cu.cuEventRecord(event, self._device.stream), "cuEventRecord")
        ticket = CudaTicket(self._device, event, self._events, on_done)
        self._slots.used_by(ticket)
        self._reporter.add(ticket)
        return ticket

    def _event(self) -> Any:
        try:
            return self._events.pop()
        except IndexError:
            return check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")


def _cut(src: Int64, dst: Int64, lengths: Int64, most: int) -> Int64:
    """Rows of (source, destination, bytes) that cover the same bytes, none longer than `most`."""
    pieces = -(-lengths // most)
    index = np.repeat(np.arange(lengths.size), pieces)
    offset = (np.arange(index.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    return np.stack(
        (src[index] + offset, dst[index] + offset, np.minimum(most, lengths[index] - offset)), axis=1
    )
