"""When one side dies, the other fails what was under way, unmaps, and goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvarena.transfer import LeaseError, PageBatch, TransferFailed
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.testing import PeerProcess, RemoteHost, assert_same_bytes, leftovers
from same_host_support import MIB, PAGE, ArenaMemory, MakeEngine, SameHost, a_lease


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvarena")


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_dead_receivers_arena_is_unmapped_and_its_successor_is_reached(
    sender: SameHost, make_receiver: Callable[..., RemoteHost]
) -> None:
    receiver = make_receiver()
    before = (mapped(), len(os.listdir("/proc/self/fd")))
    peer = sender.engine.connect(receiver.describe())
    sender.engine.submit(peer, [sender.base], [receiver.base], [MIB]).wait(10)
    assert mapped() == before[0] + 1
    receiver.process.kill()
    assert until(lambda: mapped() == before[0])
    with pytest.raises(TransferFailed):
        sender.engine.submit(peer, [sender.base], [receiver.base], [MIB]).wait(10)
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= before[1])
    successor = make_receiver()  # takes the dead one's socket over
    assert sender.engine.connect(successor.describe()) == peer
    sender.engine.submit(peer, [sender.base], [successor.base], [MIB]).wait(10)
    assert_same_bytes(successor.read(0, MIB), sender.read(0, MIB))


def test_transfers_under_way_to_a_dead_receiver_fail(
    sender: SameHost, make_receiver: Callable[..., RemoteHost]
) -> None:
    receiver = make_receiver()
    peer = sender.engine.connect(receiver.describe())
    copies = [sender.engine.submit(peer, [sender.base], [receiver.base], [8 * MIB]) for _ in range(200)]
    receiver.process.kill()
    ended = 0
    failed = 0
    for copy in copies:
        try:
            copy.wait(20)
            ended += 1
        except TransferFailed:
            failed += 1
    assert ended + failed == 200
    with pytest.raises(TransferFailed):
        sender.engine.submit(peer, [sender.base], [receiver.base], [16])


def test_a_dead_sender_fails_what_it_had_begun_and_nothing_else(
    make_receiver: Callable[..., RemoteHost], directory: Path
) -> None:
    here = SameHost(MakeEngine(directory, name="here"), ArenaMemory, 16 * MIB, 8 * MIB)
    try:
        here.register((0, 8 * MIB))
        begun, untouched = a_lease([1, 2], 1, "begun"), a_lease([3], 2, "untouched")
        here.expect(begun, untouched)
        there = make_receiver(name="there")
        there.process.call("connect", here.describe())
        there.process.call("send", "here", begun, [5], [1])
        assert until(lambda: here.pages_left(1) == 1)
        there.process.kill()
        with pytest.raises(TransferFailed, match="begun"):
            here.arrived(1)
        assert here.attached() == ()
        assert here.pages_left(2) == 1
        again = make_receiver(name="there")
        again.process.call("connect", here.describe())
        again.process.call("send", "here", untouched, [5], [3])
        assert here.arrived(2)
    finally:
        here.close()


def test_closed_engines_leave_no_thread_descriptor_mapping_or_socket(directory: Path) -> None:
    def once() -> None:
        hosts = [
            SameHost(MakeEngine(directory, name=name), ArenaMemory, 4 * MIB, 2 * MIB) for name in ("a", "b")
        ]
        for host in hosts:
            host.register((0, 2 * MIB))
        peer = hosts[0].engine.connect(hosts[1].describe())
        hosts[0].engine.submit(peer, [hosts[0].base], [hosts[1].base], [MIB]).wait(10)
        for host in hosts:
            host.close()
            host.engine.close()

    # Other tests of this process may hold arenas of their own.
    others = mapped()
    once()
    before = leftovers()
    for _ in range(5):
        once()
    assert until(lambda: leftovers()[0] <= before[0] and leftovers()[2] <= before[2])
    assert until(lambda: mapped() <= others)
    assert "memfd:kv-done" not in Path("/proc/self/maps").read_text()
    assert list(directory.iterdir()) == []


def test_a_receiver_that_closes_ends_what_waits_for_it(
    sender: SameHost, make_receiver: Callable[..., RemoteHost], processes: list[PeerProcess]
) -> None:
    receiver = make_receiver()
    lease = a_lease([1])
    receiver.process.call("expect", lease)
    peer = sender.engine.connect(receiver.describe())
    receiver.process.call("close")
    assert until(lambda: _gone(sender.engine, peer))
    with pytest.raises(TransferFailed):
        sender.engine.submit_pages(peer, PageBatch([1], [1], PAGE, lease))


def _gone(engine: SameHostEngine, peer: str) -> bool:
    try:
        engine.peer(peer)
    except TransferFailed:
        return True
    return False


@pytest.mark.parametrize("binds", ["expected from it", "admitted"])
def test_a_sender_that_dies_before_its_first_page_fails_what_it_was_to_write(
    make_receiver: Callable[..., RemoteHost],
    directory: Path,
    binds: str,
) -> None:
    here = SameHost(MakeEngine(directory, name="here"), ArenaMemory, 16 * MIB, 8 * MIB)
    try:
        here.register((0, 8 * MIB))
        mine, others = a_lease([1, 2], 1, "mine"), a_lease([3], 2, "others")
        there = make_receiver(name="there")
        there.process.call("connect", here.describe())
        incoming = here.engine.expect(mine, sender="there" if binds == "expected from it" else None)
        other = here.engine.expect(others)
        if binds == "admitted":
            there.process.call("admit", "here", mine)
            deadline = time.monotonic() + 10
            while incoming.sender is None and time.monotonic() < deadline:
                time.sleep(0.005)
        there.process.kill()
        with pytest.raises(TransferFailed, match="mine"):
            incoming.wait(10)
        assert not other.done()
        here.engine.revoke(others)
        with pytest.raises(LeaseError):
            other.wait(10)
    finally:
        here.close()
