"""One thread for one peer: a peer that hangs holds up nobody else."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from kvarena.transfer.errors import TransferFailed, TransferTimeout

__all__ = ["PeerWorker", "WorkerJob"]


class WorkerJob:
    """A `Pending` whose work runs on a `PeerWorker`, or on the thread that waits for it without a limit."""

    __slots__ = ("_claim", "_ended", "_engine", "_error", "_operations", "_peer", "_work", "_worker")

    def __init__(self, engine: str, peer: str, operations: int, work: Callable[[], None]) -> None:
        self._engine = engine
        self._peer = peer
        self._operations = operations
        self._work = work
        self._claim = threading.Lock()
        self._worker: PeerWorker | None = None
        self._ended = threading.Event()
        self._error: TransferFailed | None = None

    def done(self) -> bool:
        """Whether it has ended well. Raises `TransferFailed` if it has ended badly."""
        if self._ended.is_set() and self._error is not None:
            raise self._error
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has ended. Raises `TransferFailed` or `TransferTimeout`."""
        if timeout is None and self._worker is not None:
            # Who would only sleep can as well do the work: it saves two switches between threads.
            self._worker.run(self)
        if not self._ended.wait(timeout):
            raise TransferTimeout(self._engine, self._peer, timeout or 0.0)
        self.done()

    def belong_to(self, worker: PeerWorker) -> None:
        """Say where it will run."""
        self._worker = worker

    def claim(self) -> bool:
        """Whether the caller is the one to run it: true once."""
        return self._claim.acquire(blocking=False)

    def run(self) -> None:
        """Do the work; every way out ends the job."""
        try:
            self._work()
        except TransferFailed as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001 - told to who waits, and the thread must live on
            self._error = self._failure(type(error).__name__, str(error))
        finally:
            self._ended.set()

    def cancel(self, why: str) -> None:
        """End it without doing the work."""
        self._error = self._failure(None, why)
        self._ended.set()

    def _failure(self, code: str | None, why: str) -> TransferFailed:
        return TransferFailed(self._engine, self._peer, code, why, operations=self._operations)


class PeerWorker:
    """Runs one job at a time; a daemon thread, because an engine's call cannot be interrupted."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[WorkerJob | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._running = threading.RLock()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, job: WorkerJob) -> None:
        """Run it after those before, or when somebody waits for it."""
        with self._lock:
            if self._stopped.is_set():
                job.cancel("disconnected")
            else:
                job.belong_to(self)
                self._jobs.put(job)

    def run(self, job: WorkerJob) -> None:
        """Run it now, on this thread, unless it runs already."""
        if job.claim():
            with self._running:
                if self._stopped.is_set():
                    job.cancel("disconnected")
                else:
                    job.run()

    def stop(self, timeout: float) -> bool:
        """Cancel what has not begun; returns whether what had begun ended within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._stopped.set()
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        idle = self._running.acquire(timeout=max(0.0, deadline - time.monotonic()))
        if idle:
            self._running.release()
        return idle and not self._thread.is_alive()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.run(job)
