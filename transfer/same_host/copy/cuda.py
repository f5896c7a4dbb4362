"""Copies between mapped arenas on CUDA: one gather-scatter kernel, on a stream of its own.

A copy is one launch and one or two stores by the stream, in one call. The kernel reads its page ids
straight from pinned host memory: no upload goes before it. Its end is a number in pinned memory: nobody
has to ask the driver, and the process of the receiver sees it as soon as that of the sender.
"""

from __future__ import annotations

import threading
import time
from typing import final

import numpy as np
from cuda.bindings import driver as cu
from kvarena.transfer.protocol import Int64
from kvarena.transfer.same_host.copy.clock import Signal, await_clock
from kvarena.transfer.same_host.copy.kernel import Tuning, compile_pages, compile_spans, page_tuning
from kvarena.transfer.same_host.copy.launch import Device, Launcher, Stream, check
from kvarena.transfer.same_host.copy.tables import TABLE_WORDS, Tables
from kvarena.transfer.same_host.intervals import highest

__all__ = ["CudaCopier"]

# From this many bytes a run on, the driver's own copy is as fast as the kernel, and no table is needed.
_LARGE_RUN = 1 << 20
# Ids of pages of this size and more fit into 31 bits on any machine.
_SMALL_PAGE = 4096
# How often a waiter asks whether the device has died, instead of only looking at the count.
_FAULT_SECONDS = 0.05

_shift, _or = np.left_shift, np.bitwise_or


@final
class CudaCopier:
    """A `Copier` on one GPU; what it reads and writes is mapped for that GPU.

    Parameters
    ----------
    index : int
        The device.
    tuning : Tuning, optional
        How copies are cut; default: by the size of their pages.
    """

    def __init__(self, index: int, tuning: Tuning | None = None) -> None:
        self._device = Device(index)
        self._tuning = tuning
        self._lock = threading.Lock()
        self._launchers: dict[tuple[int, bool], Launcher] = {}
        with self._device.current():
            self._stream = Stream(self._device)
            self._tables = Tables(self._stream)
        self._count = self._tables.count_address
        self._started = 0
        self._fault: str | None = None
        self._asked = 0.0
        self._closed = False

    @property
    def ended(self) -> int:
        """See `Copier.ended`."""
        return self._tables.ended

    def has_ended(self, number: int) -> bool:
        """See `Clock.has_ended`."""
        if self._tables.ended >= number:
            return True
        if self._fault is not None:
            raise RuntimeError(self._fault)
        now = time.monotonic()
        if now - self._asked > _FAULT_SECONDS:
            self._asked = now
            self.fault()
        return False

    def wait(self, number: int, timeout: float | None) -> bool:
        """See `Clock.wait`."""
        return await_clock(self.has_ended, number, timeout)

    def fault(self) -> str | None:
        """See `Copier.fault`."""
        with self._lock:
            # Nothing is asked while nothing runs: a process that captures graphs may forbid it.
            if self._fault is None and self._tables.ended < self._started and not self._closed:
                with self._device.current():
                    self._fault = self._stream.fault()
            return self._fault

    def identity(self) -> str:
        """See `Copier.identity`: the device's UUID, which its number in a process is not."""
        return self._device.uuid

    def can_reach(self, identity: str) -> bool | None:
        """See `Copier.can_reach`."""
        return self._device.can_reach(identity)

    def adopt(self, address: int, nbytes: int) -> int:
        """See `Copier.adopt`."""
        flags = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
        with self._device.current():
            check(cu.cuMemHostRegister(address, nbytes, flags), "cuMemHostRegister")
            return int(check(cu.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))

    def disown(self, address: int) -> None:
        """See `Copier.disown`."""
        with self._device.current():
            cu.cuMemHostUnregister(address)

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
        signal: Signal | None = None,
        after: int | None = None,
    ) -> int:
        """See `Copier.copy_pages`."""
        with self._lock:
            if self._device.is_current():  # a thread that works on a device has its context already
                return self._pages(src_base, dst_base, src_pages, dst_pages, page_bytes, signal, after)
            with self._device.current():
                return self._pages(src_base, dst_base, src_pages, dst_pages, page_bytes, signal, after)

    def copy_spans(
        self,
        src: Int64,
        dst: Int64,
        lengths: Int64,
        signal: Signal | None = None,
        after: int | None = None,
    ) -> int:
        """See `Copier.copy_spans`."""
        with self._lock:
            if self._device.is_current():
                return self._spans(src, dst, lengths, signal, after)
            with self._device.current():
                return self._spans(src, dst, lengths, signal, after)

    def close(self) -> None:
        """See `Copier.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with self._device.current():
                self._stream.synchronize()
                for launcher in self._launchers.values():
                    launcher.close()
                self._tables.close()
                self._stream.close()
            self._device.close()

    def _pages(
        self,
        src_base: int,
        dst_base: int,
        src_pages: Int64,
        dst_pages: Int64,
        page_bytes: int,
        signal: Signal | None,
        after: int | None,
    ) -> int:
        if after is not None:
            self._stream.follow(after)
        count = src_pages.size
        if page_bytes < _SMALL_PAGE and count and max(highest(src_pages), highest(dst_pages)) >= 1 << 31:
            rows = np.full(count, page_bytes, np.int64)
            src, dst = src_base + src_pages * page_bytes, dst_base + dst_pages * page_bytes
            return self._spans(src, dst, rows, signal, None)
        aligned = not (src_base | dst_base) & 15
        launcher = self._launchers.get((page_bytes, aligned)) or self._launcher(page_bytes, aligned)
        spans = -(-page_bytes // launcher.span_bytes)
        while count > TABLE_WORDS:
            here, src_pages = src_pages[:TABLE_WORDS], src_pages[TABLE_WORDS:]
            there, dst_pages = dst_pages[:TABLE_WORDS], dst_pages[TABLE_WORDS:]
            self._launch_pages(launcher, spans, src_base, dst_base, here, there)
            self._finish(self._started + 1, None)
            count -= TABLE_WORDS
        if count:
            self._launch_pages(launcher, spans, src_base, dst_base, src_pages, dst_pages)
        return self._finish(self._started + 1, signal)

    def _launch_pages(
        self, launcher: Launcher, spans: int, src_base: int, dst_base: int, src: Int64, dst: Int64
    ) -> None:
        count = src.size
        words, address = self._tables.take(self._started + 1)
        words = words[:count]
        _shift(dst, 32, words)
        _or(words, src, words)
        launcher.launch(count * spans, src_base, dst_base, address)

    def _spans(self, src: Int64, dst: Int64, lengths: Int64, signal: Signal | None, after: int | None) -> int:
        if after is not None:
            self._stream.follow(after)
        if lengths.size == 1 and (nbytes := int(lengths[0])) >= _LARGE_RUN:
            self._stream.copy(int(dst[0]), int(src[0]), nbytes)
            return self._finish(self._started + 1, signal)
        large = lengths >= _LARGE_RUN
        for source, target, nbytes in np.stack((src, dst, lengths), axis=1)[large].tolist():
            self._stream.copy(target, source, nbytes)
        if not large.all():
            self._small_spans(src[~large], dst[~large], lengths[~large])
        return self._finish(self._started + 1, signal)

    def _small_spans(self, src: Int64, dst: Int64, lengths: Int64) -> None:
        launcher = self._launcher(0, int(np.bitwise_or.reduce(src | dst | lengths)) % 16 == 0)
        rows = _cut(src, dst, lengths, launcher.span_bytes)
        rows[:, 2] //= launcher.kernel.word_bytes
        step = TABLE_WORDS // 3
        for start in range(0, len(rows), step):
            batch = rows[start : start + step]
            number = self._started + 1
            words, address = self._tables.take(number)
            words[: batch.size] = batch.ravel()
            launcher.launch(len(batch), address)
            self._finish(number, None)

    def _finish(self, number: int, signal: Signal | None) -> int:
        """All of a copy, or of a launch of it, is on the stream: let it count."""
        self._started = number
        if signal is None:
            self._stream.write(self._count, number)
        else:
            word, value, _ = signal()
            self._stream.write_both(word, value, self._count, number)
        return number

    def _launcher(self, page_bytes: int, aligned: bool) -> Launcher:
        """The kernel for pages of this size; 0: the one for spans."""
        launcher = self._launchers.get((page_bytes, aligned))
        if launcher is None:
            capability = self._device.capability
            if page_bytes:
                tuning = self._tuning or page_tuning(page_bytes, aligned)
                kernel = compile_pages(capability, page_bytes, aligned, tuning)
                launcher = Launcher(self._device, self._stream, kernel, 3)
            else:
                kernel = compile_spans(capability, aligned, self._tuning or Tuning())
                launcher = Launcher(self._device, self._stream, kernel, 1)
            self._launchers[page_bytes, aligned] = launcher
        return launcher


def _cut(src: Int64, dst: Int64, lengths: Int64, maximum: int) -> Int64:
    """Rows of (source, destination, bytes) that cover the same bytes, none longer than `most`."""
    if int(lengths.max(initial=0)) <= maximum:  # pages, mostly
        return np.stack((src, dst, lengths), axis=1)
    pieces = -(-lengths // maximum)
    index = np.repeat(np.arange(lengths.size), pieces)
    offset = (np.arange(index.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * maximum
    return np.stack(
        (src[index] + offset, dst[index] + offset, np.minimum(maximum, lengths[index] - offset)), axis=1
    )
