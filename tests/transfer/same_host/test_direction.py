"""Either side may make the copies; which one is decided when they attach."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from kvarena.transfer import HandleImportError, LeaseError, TransferFailed
from kvarena.transfer.same_host.copy.host import HostCopier
from kvarena.transfer.same_host.direction import Asked, choose_direction
from kvarena.transfer.testing import RemoteHost, assert_same_bytes
from same_host_support import MIB, PAGE, ArenaMemory, MakeEngine, SameHost, a_lease


@pytest.mark.parametrize(
    ("asked", "ours", "theirs", "answer"),
    [
        ("auto", True, True, "push"),
        ("auto", None, True, "push"),
        ("auto", False, True, "pull"),
        ("auto", False, None, "pull"),
        ("push", True, False, "push"),
        ("pull", False, True, "pull"),
        ("auto", False, False, None),
        ("push", False, True, None),
        ("pull", True, False, None),
    ],
)
def test_the_way_that_is_open_is_taken(
    asked: Asked, ours: bool | None, theirs: bool | None, answer: str | None
) -> None:
    if answer is None:
        with pytest.raises(HandleImportError, match="cuDeviceCanAccessPeer"):
            choose_direction(asked, "peer", 1, ours=ours, theirs=theirs)
    else:
        assert choose_direction(asked, "peer", 1, ours=ours, theirs=theirs) == answer


def maps_of(receiver: RemoteHost) -> int:
    return Path(f"/proc/{receiver.process.pid}/maps").read_text().count("memfd:kvarena")


@pytest.fixture
def puller(make_sender: Callable[..., SameHost]) -> SameHost:
    """A sender that lets the receiver read."""
    return make_sender(direction="pull")


def test_a_receiver_that_pulls_maps_the_sender_and_not_the_other_way(
    puller: SameHost, receiver: RemoteHost
) -> None:
    before = maps_of(receiver)
    peer = puller.engine.connect(receiver.describe())
    assert puller.engine.peer(peer).direction == "pull"
    assert puller.engine.peer(peer).mapped_bytes == 0
    assert maps_of(receiver) == before + 1
    src, dst = np.arange(3000) % 512, np.arange(3000) % 512
    lease = a_lease(list(range(300)))
    receiver.process.call("expect", lease)
    puller.engine.submit_pages(peer, src[:300], dst[:300], PAGE, lease).wait(10)
    puller.engine.submit(peer, [puller.base], [receiver.base + 7 * MIB], [MIB]).wait(10)
    assert receiver.process.call("arrived", 1)
    assert_same_bytes(receiver.read(0, 300 * PAGE), puller.read(0, 300 * PAGE))
    assert_same_bytes(receiver.read(7 * MIB, MIB), puller.read(0, MIB))


def test_a_lease_that_the_receiver_does_not_await_is_not_pulled(
    puller: SameHost, receiver: RemoteHost
) -> None:
    peer = puller.engine.connect(receiver.describe())
    with pytest.raises(TransferFailed):
        puller.engine.submit_pages(peer, [1], [1], PAGE, a_lease([1])).wait(10)
    forged = a_lease([1, 2], 5)
    receiver.process.call("expect", a_lease([1], 5))
    with pytest.raises(TransferFailed):
        puller.engine.submit_pages(peer, [1, 2], [1, 2], PAGE, forged).wait(10)
    assert_same_bytes(receiver.read(0, 3 * PAGE), bytes(3 * PAGE))


def test_memory_that_the_sender_takes_back_is_no_longer_mapped_by_who_pulls(
    puller: SameHost, receiver: RemoteHost
) -> None:
    peer = puller.engine.connect(receiver.describe())
    before = maps_of(receiver)
    puller.memory.arena.grow(12 * MIB)
    puller.register((8 * MIB, 4 * MIB))
    deadline = time.monotonic() + 10
    while maps_of(receiver) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    puller.engine.submit(peer, [puller.base + 11 * MIB], [receiver.base], [MIB]).wait(10)
    puller.unregister((8 * MIB, 4 * MIB))
    assert maps_of(receiver) == before
    puller.memory.arena.shrink(8 * MIB)
    with pytest.raises(TransferFailed):
        puller.engine.submit(peer, [puller.base + 11 * MIB], [receiver.base], [MIB])
    puller.engine.submit(peer, [puller.base], [receiver.base], [MIB]).wait(10)


def test_a_receiver_that_takes_memory_back_is_not_written_to(puller: SameHost, receiver: RemoteHost) -> None:
    receiver.grow(12 * MIB)
    receiver.register((8 * MIB, 4 * MIB))
    peer = puller.engine.connect(receiver.describe())
    puller.engine.submit(peer, [puller.base], [receiver.base + 8 * MIB], [MIB]).wait(10)
    receiver.unregister((8 * MIB, 4 * MIB))
    with pytest.raises(TransferFailed):
        puller.engine.submit(peer, [puller.base], [receiver.base + 8 * MIB], [MIB])


def test_a_dead_puller_fails_what_it_had_not_copied(
    puller: SameHost, make_receiver: Callable[..., RemoteHost]
) -> None:
    receiver = make_receiver()
    peer = puller.engine.connect(receiver.describe())
    copies = [puller.engine.submit(peer, [puller.base], [receiver.base], [8 * MIB]) for _ in range(50)]
    receiver.process.kill()
    failed = 0
    for copy in copies:
        try:
            copy.wait(20)
        except TransferFailed:
            failed += 1
    assert failed
    successor = make_receiver()
    puller.engine.connect(successor.describe())
    puller.engine.submit(peer, [puller.base], [successor.base], [MIB]).wait(10)
    assert_same_bytes(successor.read(0, MIB), puller.read(0, MIB))


def test_a_sender_that_cannot_reach_the_receiver_is_pulled_from(
    sender: SameHost, receiver: RemoteHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopier, "can_reach", lambda _self, _identity: False)
    peer = sender.engine.connect(receiver.describe())
    assert sender.engine.peer(peer).direction == "pull"
    sender.engine.submit(peer, [sender.base], [receiver.base], [MIB]).wait(10)
    assert_same_bytes(receiver.read(0, MIB), sender.read(0, MIB))


def test_a_way_that_is_closed_is_refused_with_its_reason(
    make_sender: Callable[..., SameHost], receiver: RemoteHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopier, "can_reach", lambda _self, _identity: False)
    pusher = make_sender(direction="push")
    with pytest.raises(HandleImportError, match="our device cannot access the peer's"):
        pusher.engine.connect(receiver.describe())
    # The receiver hears of it through the socket.
    deadline = time.monotonic() + 10
    while receiver.process.call("attached") and time.monotonic() < deadline:
        time.sleep(0.005)
    assert receiver.process.call("attached") == ()


@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("binds", ["expected from it", "admitted"])
def test_a_sender_that_dies_before_its_first_page_fails_what_it_was_to_write(
    make_receiver: Callable[..., RemoteHost],
    directory: Path,
    way: Literal["push", "pull"],
    binds: str,
) -> None:
    here = SameHost(MakeEngine(directory, name="here"), ArenaMemory, 16 * MIB, 8 * MIB)
    try:
        here.register((0, 8 * MIB))
        mine, others = a_lease([1, 2], 1, "mine"), a_lease([3], 2, "others")
        there = make_receiver(name="there", direction=way)
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
