"""Leased pages arrive whole, are reported, and nothing else is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvarena.transfer import Lease, LeaseError, PageBatch, PageError, TransferFailed, TransferTimeout
from kvarena.transfer.testing import RemoteHost, assert_same_bytes
from same_host_support import MIB, PAGE, SameHost, a_lease

PAGES = 8 * MIB // PAGE


@pytest.fixture
def peer(sender: SameHost, receiver: RemoteHost) -> str:
    """The sender is attached to the receiver."""
    return sender.engine.connect(receiver.describe())


def expect(receiver: RemoteHost, *leases: Any) -> None:
    receiver.process.call("expect", *leases)


def arrived(receiver: RemoteHost, serial: int, timeout: float = 10.0) -> bool:
    answer: bool = receiver.process.call("arrived", serial, timeout)
    return answer


def test_random_pages_arrive_and_no_other_byte_changes(
    sender: SameHost, receiver: RemoteHost, peer: str
) -> None:
    rng = np.random.default_rng(1)
    src, dst = rng.permutation(PAGES)[:200], rng.permutation(PAGES)[:200]
    lease = a_lease(dst.tolist())
    expect(receiver, lease)
    sender.engine.submit_pages(peer, PageBatch(src, dst, PAGE, lease)).wait(10)
    assert arrived(receiver, 1)
    expected = np.zeros((PAGES, PAGE), np.uint8)
    expected[dst] = np.frombuffer(sender.read(0, 8 * MIB), np.uint8).reshape(PAGES, PAGE)[src]
    assert_same_bytes(receiver.read(0, 8 * MIB), expected.tobytes())


@pytest.mark.parametrize("page_bytes", [96, 512, 4096, 3 * 4096])
def test_pages_of_any_size_arrive(sender: SameHost, receiver: RemoteHost, peer: str, page_bytes: int) -> None:
    rng = np.random.default_rng(page_bytes)
    count = 4 * MIB // page_bytes
    src, dst = rng.permutation(count)[: count // 2], rng.permutation(count)[: count // 2]
    lease = a_lease(dst.tolist())
    expect(receiver, lease)
    sender.engine.submit_pages(peer, PageBatch(src, dst, page_bytes, lease)).wait(10)
    size = count * page_bytes
    expected = np.zeros((count, page_bytes), np.uint8)
    expected[dst] = np.frombuffer(sender.read(0, size), np.uint8).reshape(count, page_bytes)[src]
    assert_same_bytes(receiver.read(0, size), expected.tobytes())


def test_a_request_is_complete_only_when_every_leased_page_is_written(
    sender: SameHost, receiver: RemoteHost, peer: str
) -> None:
    lease = a_lease([5, 9, 2, 7, 3])
    expect(receiver, lease)
    for dst in ([5, 9], [3], [7]):  # in the lease's order, then not
        sender.engine.submit_pages(peer, PageBatch(dst, dst, PAGE, lease)).wait(10)
    with pytest.raises(TransferTimeout):
        arrived(receiver, 1, 0.2)
    assert receiver.process.call("comes_down_to", 1, 1)
    sender.engine.submit_pages(peer, PageBatch([2], [2], PAGE, lease)).wait(10)
    assert arrived(receiver, 1)


def test_sub_pools_of_one_lease_are_counted_apart(sender: SameHost, receiver: RemoteHost, peer: str) -> None:
    lease = a_lease([1, 2])
    lease.pages["swa"] = (2,)
    expect(receiver, lease)
    sender.engine.submit_pages(peer, PageBatch([1, 2], [1, 2], PAGE, lease)).wait(10)
    assert receiver.process.call("comes_down_to", 1, 1)
    sender.engine.submit_pages(peer, PageBatch([8], [2], 2 * PAGE, lease, sub_pool="swa")).wait(10)
    assert arrived(receiver, 1)
    assert_same_bytes(receiver.read(4 * PAGE, 2 * PAGE), sender.read(16 * PAGE, 2 * PAGE))


def test_a_sub_pool_without_pages_may_come_last(sender: SameHost, receiver: RemoteHost, peer: str) -> None:
    lease = Lease(request="r", serial=1, epoch=0, pages={"full": (3,), "swa": ()})
    expect(receiver, lease)
    sender.engine.submit_pages(peer, PageBatch([1], [3], PAGE, lease)).wait(10)
    sender.engine.submit_pages(peer, PageBatch([], [], PAGE, lease, sub_pool="swa")).wait(10)
    assert arrived(receiver, 1)
    with pytest.raises(LeaseError, match="written whole"):
        sender.engine.submit_pages(peer, PageBatch([1], [3], PAGE, lease))
    with pytest.raises(LeaseError, match="nothing of sub-pool"):
        sender.engine.submit_pages(peer, PageBatch([], [], PAGE, lease, sub_pool="other"))


@pytest.mark.parametrize(
    ("src", "dst", "sub_pool"),
    [([1, 2], [10, 11], "full"), ([1], [-1], "full"), ([1, 2], [10, 10], "full"), ([1], [10], "swa")],
    ids=["not leased", "negative", "twice", "another sub-pool"],
)
def test_pages_that_are_not_leased_are_not_written(
    sender: SameHost, receiver: RemoteHost, peer: str, src: list[int], dst: list[int], sub_pool: str
) -> None:
    lease = a_lease([10, 12])
    expect(receiver, lease)
    with pytest.raises(LeaseError):
        sender.engine.submit_pages(peer, PageBatch(src, dst, PAGE, lease, sub_pool=sub_pool))
    assert_same_bytes(receiver.read(0, 8 * MIB), bytes(8 * MIB))
    sender.engine.submit_pages(peer, PageBatch([1, 2], [10, 12], PAGE, lease)).wait(
        10
    )  # the lease still holds
    assert arrived(receiver, 1)


def test_a_page_is_written_once_under_a_lease(sender: SameHost, receiver: RemoteHost, peer: str) -> None:
    lease = a_lease([4, 5])
    expect(receiver, lease)
    sender.engine.submit_pages(peer, PageBatch([1], [5], PAGE, lease)).wait(10)
    with pytest.raises(LeaseError, match="twice"):
        sender.engine.submit_pages(peer, PageBatch([2], [5], PAGE, lease))
    sender.engine.submit_pages(peer, PageBatch([1], [4], PAGE, lease)).wait(10)
    with pytest.raises(LeaseError, match="written whole"):
        sender.engine.submit_pages(peer, PageBatch([2], [4], PAGE, lease))
    assert_same_bytes(receiver.read(5 * PAGE, PAGE), sender.read(PAGE, PAGE))


def test_nothing_is_written_under_a_revoked_lease(sender: SameHost, receiver: RemoteHost, peer: str) -> None:
    lease = a_lease([4, 5])
    expect(receiver, lease)
    sender.engine.submit_pages(peer, PageBatch([1], [4], PAGE, lease)).wait(10)
    receiver.process.call("revoke", lease)
    with pytest.raises(LeaseError, match="revoked"):
        sender.engine.submit_pages(peer, PageBatch([1], [5], PAGE, lease))
    with pytest.raises(LeaseError, match="revoked"):
        arrived(receiver, 1)
    assert_same_bytes(receiver.read(5 * PAGE, PAGE), bytes(PAGE))
    again = a_lease([5], serial=2)
    expect(receiver, again)
    sender.engine.submit_pages(peer, PageBatch([1], [5], PAGE, again)).wait(10)
    assert arrived(receiver, 2)


def test_the_receiver_is_told_at_once_when_pages_will_not_come(
    sender: SameHost, receiver: RemoteHost, peer: str
) -> None:
    """O11: no lease waits for its timeout because the sender failed."""
    given_up, no_source, no_memory = a_lease([1], 1, "a"), a_lease([2], 2, "b"), a_lease([PAGES], 3, "c")
    expect(receiver, given_up, no_source, no_memory)
    sender.engine.give_up(peer, given_up, "the prefill was aborted")
    with pytest.raises(TransferFailed, match="source pages"):
        sender.engine.submit_pages(peer, PageBatch([PAGES], [2], PAGE, no_source))
    with pytest.raises(TransferFailed, match="not all registered there"):
        sender.engine.submit_pages(peer, PageBatch([1], [PAGES], PAGE, no_memory))
    for serial, why in ((1, "aborted"), (2, "source pages"), (3, "registered")):
        with pytest.raises(TransferFailed, match=why):
            arrived(receiver, serial, 30)
    with pytest.raises(LeaseError, match="given up"):
        sender.engine.submit_pages(peer, PageBatch([1], [1], PAGE, given_up))
    assert_same_bytes(receiver.read(0, 8 * MIB), bytes(8 * MIB))


def test_lists_that_do_not_fit_are_refused(sender: SameHost, peer: str) -> None:
    lease = a_lease([1, 2])
    for src, dst, page_bytes in (([1], [1, 2], PAGE), ([[1]], [[1]], PAGE), ([1], [1], 0)):
        with pytest.raises(PageError):
            sender.engine.submit_pages(peer, PageBatch(src, dst, page_bytes, lease))
    sender.engine.submit_pages(peer, PageBatch([], [], PAGE, lease)).wait(10)


def test_a_lease_is_awaited_once(receiver: RemoteHost) -> None:
    expect(receiver, a_lease([1]))
    with pytest.raises(LeaseError, match="awaited already"):
        expect(receiver, a_lease([1]))
