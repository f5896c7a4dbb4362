"""The thread that writes to one peer: in order, one at a time, and never after it was stopped."""

from __future__ import annotations

import threading

import pytest
from kvarena.transfer import TransferFailed, TransferTimeout
from kvarena.transfer._worker import PeerWorker, WorkerJob


def job(work: object) -> WorkerJob:
    return WorkerJob("engine", "peer", 3, work)  # type: ignore[arg-type]


def test_jobs_run_in_order() -> None:
    worker, ran = PeerWorker("test"), []
    jobs = [job(lambda i=i: ran.append(i)) for i in range(20)]
    for one in jobs:
        worker.put(one)
    for one in jobs:
        one.wait(10)
    assert ran == list(range(20))
    assert worker.stop(10)


def test_who_waits_without_a_limit_does_the_work() -> None:
    worker, hold = PeerWorker("test"), threading.Event()
    threads: list[threading.Thread] = []
    first, second = job(lambda: hold.wait(10)), job(lambda: threads.append(threading.current_thread()))
    worker.put(second)  # before the worker has the first
    second.wait()
    worker.put(first)
    hold.set()
    first.wait(10)
    assert len(threads) == 1
    assert worker.stop(10)


def test_one_job_runs_at_a_time_whoever_runs_it() -> None:
    worker = PeerWorker("test")
    inside, maximum = 0, 0

    def work() -> None:
        nonlocal inside, maximum
        inside += 1
        maximum = max(maximum, inside)
        threading.Event().wait(0.002)
        inside -= 1

    def submit_and_wait() -> None:
        for _ in range(10):
            one = job(work)
            worker.put(one)
            one.wait()

    threads = [threading.Thread(target=submit_and_wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maximum == 1
    assert worker.stop(10)


def test_any_exception_ends_the_job_and_not_the_thread() -> None:
    worker = PeerWorker("test")

    def fail() -> None:
        raise OSError(5, "broken")

    bad, good = job(fail), job(lambda: None)
    worker.put(bad)
    worker.put(good)
    good.wait(10)
    for look in (bad.done, bad.wait):
        with pytest.raises(TransferFailed, match="broken") as failed:
            look()
        assert (failed.value.code, failed.value.operations) == ("OSError", 3)
    assert worker.stop(10)


def test_stopping_cancels_what_has_not_begun_and_says_whether_something_still_runs() -> None:
    worker, begun, hold = PeerWorker("test"), threading.Event(), threading.Event()
    ran: list[int] = []

    def busy() -> None:
        begun.set()
        hold.wait(10)

    running, waiting, late = job(busy), job(lambda: ran.append(1)), job(lambda: ran.append(2))
    worker.put(running)
    worker.put(waiting)
    assert begun.wait(10)
    with pytest.raises(TransferTimeout):
        running.wait(0.01)
    assert not worker.stop(0.01)
    worker.put(late)
    with pytest.raises(TransferFailed, match="disconnected"):
        late.wait(10)
    hold.set()
    running.wait(10)
    with pytest.raises(TransferFailed, match="disconnected"):
        waiting.wait(10)
    assert ran == []
    assert worker.stop(10)
