"""Memory comes and goes under traffic, and a peer holds none that was given back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvarena.transfer import PageBatch, QuiesceTimeout, Region, TransferFailed
from kvarena.transfer.testing import RemoteHost, assert_same_bytes
from same_host_support import MIB, PAGE, ArenaMemory, MakeEngine, SameHost, a_lease


def test_growth_and_give_back_under_traffic_refuse_nothing(sender: SameHost, receiver: RemoteHost) -> None:
    peer = sender.engine.connect(receiver.describe())
    rng = np.random.default_rng(2)
    stop = threading.Event()
    failures: list[Exception] = []
    rounds = 0

    def traffic() -> None:
        nonlocal rounds
        try:
            while not stop.is_set():
                rounds += 1
                dst = rng.permutation(256)[:64]
                lease = a_lease(dst.tolist(), rounds)
                sender.engine.submit_pages(peer, PageBatch(dst + 256, dst, PAGE, lease)).wait(10)
        except Exception as error:  # noqa: BLE001 - the test's own thread asserts on it
            failures.append(error)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        for _ in range(15):
            receiver.process.call("fill_and_grow_cycle", 8 * MIB, 12 * MIB)
            sender.memory.arena.grow(12 * MIB)
            sender.register((8 * MIB, 4 * MIB))
            sender.unregister((8 * MIB, 4 * MIB))
            sender.memory.arena.shrink(8 * MIB)
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert rounds >= 15
    last = a_lease(list(range(256)), 0)
    sender.engine.submit_pages(peer, PageBatch(np.arange(256) + 256, np.arange(256), PAGE, last)).wait(10)
    assert_same_bytes(receiver.read(0, 4 * MIB), sender.read(4 * MIB, 4 * MIB))
    assert sender.engine.peer(peer).mapped_bytes == 8 * MIB


def test_growth_is_mapped_once_the_new_description_is_connected_to(
    sender: SameHost, receiver: RemoteHost
) -> None:
    peer = sender.engine.connect(receiver.describe())
    with pytest.raises(TransferFailed, match="Connect to its new description"):
        sender.engine.submit(peer, [sender.base], [receiver.base + 8 * MIB], [PAGE])
    receiver.grow(16 * MIB)
    receiver.register((8 * MIB, 8 * MIB))
    assert sender.engine.connect(receiver.describe()) == peer
    assert sender.engine.peer(peer).mapped_bytes == 16 * MIB
    seam = receiver.base + 8 * MIB
    sender.engine.submit(peer, [sender.base], [seam - PAGE], [2 * PAGE]).wait(10)
    assert_same_bytes(receiver.read(8 * MIB - PAGE, 2 * PAGE), sender.read(0, 2 * PAGE))


def test_what_is_unregistered_is_unmapped_at_the_peer_before_the_call_returns(
    sender: SameHost, receiver: RemoteHost
) -> None:
    receiver.grow(16 * MIB)
    receiver.register((8 * MIB, 8 * MIB))
    peer = sender.engine.connect(receiver.describe())
    receiver.unregister((8 * MIB, 8 * MIB))
    assert sender.engine.peer(peer).mapped_bytes == 8 * MIB
    receiver.process.call("shrink", 8 * MIB)
    with pytest.raises(TransferFailed):
        sender.engine.submit(peer, [sender.base], [receiver.base + 8 * MIB], [PAGE])
    sender.engine.submit(peer, [sender.base], [receiver.base], [PAGE]).wait(10)


def test_a_swapped_handle_is_followed(sender: SameHost, receiver: RemoteHost) -> None:
    """As at finalize: the sink's handle goes, one handle over the whole prefix comes."""
    peer = sender.engine.connect(receiver.describe())
    sender.engine.submit(peer, [sender.base], [receiver.base], [PAGE]).wait(10)
    receiver.unregister((0, 8 * MIB))
    receiver.process.call("back_anew", 12 * MIB)
    receiver.register((0, 12 * MIB))
    sender.engine.connect(receiver.describe())
    sender.engine.submit(peer, [sender.base + PAGE], [receiver.base + 11 * MIB], [PAGE]).wait(10)
    assert_same_bytes(receiver.read(11 * MIB, PAGE), sender.read(PAGE, PAGE))
    assert_same_bytes(receiver.read(0, PAGE), bytes(PAGE))


def test_an_arena_of_very_many_handles_is_exported_whole(
    make_sender: Callable[..., SameHost], make_receiver: Callable[..., RemoteHost]
) -> None:
    receiver = make_receiver()
    receiver.process.call("grow_in_steps", 8 * MIB, 150, 8192)
    receiver.register((8 * MIB, 150 * 8192))
    sender = make_sender()
    peer = sender.engine.connect(receiver.describe())
    assert sender.engine.peer(peer).mapped_bytes == 8 * MIB + 150 * 8192
    sender.engine.submit(peer, [sender.base], [receiver.base + 8 * MIB], [150 * 8192]).wait(10)
    assert_same_bytes(receiver.read(8 * MIB, 150 * 8192), sender.read(0, 150 * 8192))


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread has noticed."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(
        task.read_text().rsplit(")")[1].split()[0] != "T" for task in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_peer_that_does_not_answer_is_detached_and_stops_nobody(
    make_receiver: Callable[..., RemoteHost], directory: Path
) -> None:
    stopped = make_receiver(name="stopped")
    here = SameHost(MakeEngine(directory, name="here", drain_timeout=0.5), ArenaMemory, 16 * MIB, 8 * MIB)
    try:
        here.register((0, 8 * MIB))
        stopped.process.call("connect", here.describe())
        assert here.attached() == ("stopped",)
        stop(stopped.process.pid)
        try:
            here.unregister((0, 8 * MIB))
            assert here.attached() == ()
            assert here.engine.regions == ()
            here.register((0, 8 * MIB))
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
    finally:
        here.close()


def test_refresh_exports_what_was_swapped_beneath_a_region(sender: SameHost, receiver: RemoteHost) -> None:
    peer = sender.engine.connect(receiver.describe())
    receiver.process.call("back_anew", 8 * MIB)
    receiver.process.call("refresh")
    sender.engine.connect(receiver.describe())
    sender.engine.submit(peer, [sender.base], [receiver.base], [PAGE]).wait(10)
    assert_same_bytes(receiver.read(0, PAGE), sender.read(0, PAGE))
    assert sender.engine.regions == (Region(sender.base, 8 * MIB),)


def test_memory_that_could_not_be_taken_back_is_registered_still(
    sender: SameHost, make_sender: Callable[..., SameHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that was started between the check and the removal hangs: who asks again must hear of it."""
    receiver = make_sender(name="receiver")
    engine, regions = receiver.engine, receiver.engine.regions
    hangs = [False, True]  # as long as it does

    def drain(_timeout: float) -> None:
        if hangs and hangs.pop(0):
            raise QuiesceTimeout("Transfers did not end", in_flight=1, seconds=0)

    monkeypatch.setattr(engine._peers, "drain", drain)
    with pytest.raises(QuiesceTimeout):
        engine.unregister(regions)
    assert engine.regions == regions
    peer = sender.engine.connect(receiver.describe())
    sender.engine.submit(peer, [sender.base], [receiver.base], [PAGE]).wait(10)
    engine.unregister(regions)
    assert engine.regions == ()
