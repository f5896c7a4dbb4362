"""CUDA copies in flight: their events, the pinned tables that they read, and who reports their end."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from typing import Any, final

import numpy as np
from cuda.bindings import driver as cu
from kvarena.transfer._copy import Int64, OnDone
from kvarena.transfer._copy_launch import Device, check

__all__ = ["SLOT_WORDS", "CudaTicket", "Reporter", "Slots"]

_log = logging.getLogger(__name__)

SLOT_WORDS = 16 * 1024
"""int64 words of one table: 8192 pages, or 5461 spans."""
_SLOTS = 32
# A waiter polls without sleeping for this long; most transfers end within it.
_SPIN_SECONDS = 1e-3
_SLEEP_SECONDS = 50e-6
# The reporter looks this often for copies that nobody waits for, and this many times before it sleeps deeply.
_LOOK_SECONDS = 100e-6
_IDLE_LOOKS = 20


@final
class CudaTicket:
    """A copy whose end an event marks; whoever sees the event first reports it."""

    __slots__ = ("_device", "_ended", "_event", "_lock", "_on_done", "_pool")

    def __init__(self, device: Device, event: Any, pool: list[Any], on_done: OnDone) -> None:
        self._device = device
        self._event = event
        self._pool = pool
        self._on_done = on_done
        self._lock = threading.Lock()
        self._ended = False

    def poll(self) -> bool:
        """See `Ticket.poll`."""
        if self._ended:
            return True
        (code,) = cu.cuEventQuery(self._event)
        if code == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if code == cu.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread that never used this device
            with self._device.current():
                (code,) = cu.cuEventQuery(self._event)
            if code == cu.CUresult.CUDA_ERROR_NOT_READY:
                return False
        self._end(
            None if code == cu.CUresult.CUDA_SUCCESS else RuntimeError(f"cuEventQuery answered {code.name}")
        )
        return True

    def wait(self, timeout: float | None) -> bool:
        """See `Ticket.wait`."""
        start = time.perf_counter()
        while not self.poll():
            waited = time.perf_counter() - start
            if timeout is not None and waited >= timeout:
                return False
            if waited >= _SPIN_SECONDS:
                time.sleep(_SLEEP_SECONDS)
        return True

    def _end(self, error: BaseException | None) -> None:
        with self._lock:  # a second thread returns only when the first has reported
            if self._ended:
                return
            try:
                self._on_done(error)
            except Exception:  # noqa: BLE001 - a thread that serves others must live on
                _log.exception("a completed copy could not be reported")
            self._ended = True
            self._pool.append(self._event)


@final
class Slots:
    """Tables in pinned host memory that kernels read while they run, used in turn. The caller locks."""

    def __init__(self, device: Device) -> None:
        self._device = device
        with device.current():
            flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
            self._address = int(check(cu.cuMemHostAlloc(_SLOTS * SLOT_WORDS * 8, flags), "cuMemHostAlloc"))
        words = memoryview((ctypes.c_int64 * (_SLOTS * SLOT_WORDS)).from_address(self._address))
        self._table: Int64 = np.frombuffer(words, np.int64).reshape(_SLOTS, SLOT_WORDS)
        self._users: list[CudaTicket | None] = [None] * _SLOTS
        self._unrecorded: list[int] = []
        self._next = 0

    def take(self) -> tuple[Int64, int]:
        """A table that nothing reads any more, and its address for the device."""
        slot = self._next
        self._next = (slot + 1) % _SLOTS
        user = self._users[slot]
        if user is not None:
            user.wait(None)
            self._users[slot] = None
        elif slot in self._unrecorded:  # one copy went through all of them
            check(cu.cuStreamSynchronize(self._device.stream), "cuStreamSynchronize")
            self._unrecorded.clear()
        self._unrecorded.append(slot)
        return self._table[slot], self._address + slot * SLOT_WORDS * 8

    def used_by(self, ticket: CudaTicket | None) -> None:
        """Slots taken since the last call are read until this ticket ends (None: no more)."""
        for slot in self._unrecorded:
            self._users[slot] = ticket
        self._unrecorded.clear()

    def close(self) -> None:
        """Free the memory."""
        with self._device.current():
            cu.cuMemFreeHost(self._address)


@final
class Reporter:
    """A thread that sees the end of copies nobody waits for."""

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._flying: deque[CudaTicket] = deque()
        self._wake = threading.Event()
        self._deep = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, ticket: CudaTicket) -> None:
        """Watch one more."""
        self._flying.append(ticket)
        if self._deep:
            self._wake.set()

    def close(self) -> None:
        """End when all that was added has ended."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        with self._device.current():
            idle = 0
            while True:
                if self._flying:
                    idle = 0
                    if self._flying[0].poll():
                        self._flying.popleft()
                        continue
                elif self._closed:
                    return
                else:
                    idle += 1
                if idle < _IDLE_LOOKS:
                    time.sleep(_LOOK_SECONDS)
                    continue
                self._deep = True
                if (
                    not self._flying and not self._closed
                ):  # asked after the flag is up, or a wake could be lost
                    self._wake.wait()
                self._deep = False
                self._wake.clear()
                idle = 0
