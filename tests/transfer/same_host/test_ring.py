"""Finished copies are counted in memory that both sides share, and nothing that is written there hurts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvarena.transfer import PageBatch, TransferFailed
from kvarena.transfer.same_host.copy import host as host_module
from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.incoming import IncomingTable, Source
from kvarena.transfer.same_host.ring import RECORDS, Ring
from kvarena.transfer.same_host.sent_leases import lease_digest
from kvarena.transfer.testing import RemoteHost
from same_host_support import MIB, PAGE, SameHost, a_lease


@pytest.fixture
def ends() -> Iterator[tuple[Ring, Ring]]:
    """The sender's and the receiver's mapping of one ring."""
    receiver, fd = Ring.make()
    sender = Ring(fd)
    os.close(fd)
    yield sender, receiver
    sender.close()
    receiver.close()


def finish(ring: Ring, number: int) -> None:
    """What a copy does at its end."""
    ring._words[0] = number


def test_records_are_read_in_order_and_only_when_their_copies_have_ended(ends: tuple[Ring, Ring]) -> None:
    sender, receiver = ends
    for index in range(3 * RECORDS):  # around several times
        assert sender.begin(b"d" * 16, 1, index, 7) == index + 1
        assert receiver.next_ended() is None
        finish(sender, index + 1)
        found = receiver.next_ended()
        assert found is not None
        assert (found[0].digest, found[0].part, found[0].pages, found[0].epoch) == (b"d" * 16, 1, index, 7)
        assert found[1]
    assert receiver.next_ended() is None


def test_a_record_that_is_not_read_is_not_overwritten(ends: tuple[Ring, Ring]) -> None:
    sender, receiver = ends
    for number in range(1, RECORDS + 1):
        assert sender.begin(bytes(16), 0, number, 0) == number
    assert sender.begin(bytes(16), 0, 0, 0) == 0
    finish(sender, RECORDS)
    assert receiver.next_ended() is not None
    assert sender.begin(bytes(16), 0, 5, 0) == RECORDS + 1
    assert [record.pages for record in receiver.begun()] == [*range(2, RECORDS + 1), 5]


def test_what_failed_is_told_even_if_nothing_ends_after_it(ends: tuple[Ring, Ring]) -> None:
    sender, receiver = ends
    sender.begin(b"a" * 16, 0, 1, 0)
    sender.fail(1)
    sender.begin(b"b" * 16, 0, 1, 0)
    finish(sender, 2)
    read = [receiver.next_ended() for _ in range(2)]
    assert [(found[0].digest[:1], found[1]) for found in read if found] == [(b"a", False), (b"b", True)]


def test_a_copy_that_could_not_be_started_was_never_begun(ends: tuple[Ring, Ring]) -> None:
    sender, receiver = ends
    sender.take_back(sender.begin(b"a" * 16, 0, 1, 0))
    assert receiver.begun() == []
    assert sender.begin(b"b" * 16, 0, 1, 0) == 1
    assert [record.digest[:1] for record in receiver.begun()] == [b"b"]


def test_copies_that_were_never_begun_are_nonsense_and_end_the_connection(ends: tuple[Ring, Ring]) -> None:
    sender, receiver = ends
    finish(sender, 3)
    with pytest.raises(WireError):
        receiver.next_ended()
    table, told = IncomingTable(), list[str]()
    table.listen(Source("liar", receiver, told.append))
    table.collect()
    table.collect()
    assert len(told) == 1


@given(st.integers(0, 4), st.integers(0, 2**64 - 1), st.integers(0, 3), st.booleans())
def test_no_record_makes_a_lease_complete_that_is_not(part: int, pages: int, epoch: int, right: bool) -> None:
    receiver, fd = Ring.make()
    sender = Ring(fd)
    os.close(fd)
    table, told, lease = IncomingTable(), list[str](), a_lease([1, 2, 3])
    source = Source("s", receiver, told.append)
    table.listen(source)
    incoming = table.expect(lease, 2, None)
    sender.begin(lease_digest(lease) if right else b"?" * 16, part, pages, epoch)
    finish(sender, 1)
    whole = right and part == 0 and pages == 3 and epoch >= 2
    assert incoming.done() is whole
    sane = not right or (part == 0 and 0 < pages <= 3 and epoch >= 2)
    assert bool(told) is not sane
    sender.close()
    table.lost(source, "it went")
    if whole:
        assert incoming.done()
    elif right and sane:
        with pytest.raises(TransferFailed):
            incoming.done()


def test_memory_of_another_size_or_not_sealed_is_refused() -> None:
    for size in (4096, 4096 + 64 * RECORDS):
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        with pytest.raises(WireError):
            Ring(fd)
        os.close(fd)
    read, write = os.pipe()
    with pytest.raises(WireError):
        Ring(read)
    os.close(read)
    os.close(write)


def test_a_receiver_that_reads_late_is_reminded_and_loses_nothing(
    sender: SameHost, receiver: RemoteHost
) -> None:
    peer = sender.engine.connect(receiver.describe())
    pages = list(range(256))
    leases = [a_lease(pages, serial) for serial in range(2 * RECORDS // 256)]
    last = a_lease([300], 99)
    receiver.process.call("expect", *leases, last)
    for lease in leases:
        for page in pages:  # one record each, and nobody waits there
            sender.engine.submit_pages(peer, PageBatch([page], [page], PAGE, lease))
    sender.engine.submit_pages(peer, PageBatch([1], [300], PAGE, last)).wait(10)
    assert all(receiver.process.call("arrived", lease.serial) for lease in (*leases, last))


def test_a_copy_that_fails_is_told_on_both_sides_and_the_next_one_is_good(
    sender: SameHost, receiver: RemoteHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = sender.engine.connect(receiver.describe())
    bad, good = a_lease([1, 2], 1, "bad"), a_lease([3], 2, "good")
    receiver.process.call("expect", bad, good)
    move = host_module._move_pages

    def fail(*_: object) -> None:
        raise MemoryError("no memory for that")

    monkeypatch.setattr(host_module, "_move_pages", fail)
    pending = sender.engine.submit_pages(peer, PageBatch([1], [1], PAGE, bad))
    with pytest.raises(TransferFailed, match="no memory for that"):
        pending.wait(10)
    monkeypatch.setattr(host_module, "_move_pages", move)
    sender.engine.submit_pages(peer, PageBatch([1], [3], PAGE, good)).wait(10)
    assert receiver.process.call("arrived", 2)
    with pytest.raises(TransferFailed, match="bad"):
        receiver.process.call("arrived", 1)


def test_leases_of_pages_far_apart_are_checked_alike(
    make_receiver: Callable[..., RemoteHost], sender: SameHost
) -> None:
    """Where a map of all pages would be too large."""
    receiver = make_receiver()
    peer = sender.engine.connect(receiver.describe())
    pages = np.random.default_rng(4).permutation(8 * MIB // 16)[:3000]
    lease = a_lease(pages.tolist())
    receiver.process.call("expect", lease)
    order = np.random.default_rng(5).permutation(pages)
    for part in np.array_split(order, 4):
        sender.engine.submit_pages(peer, PageBatch(part, part, 16, lease)).wait(10)
    assert receiver.process.call("arrived", 1)
    rows = np.frombuffer(receiver.read(0, 8 * MIB), np.uint8).reshape(-1, 16)
    ours = np.frombuffer(sender.read(0, 8 * MIB), np.uint8).reshape(-1, 16)
    assert np.array_equal(rows[pages], ours[pages])
    assert int((rows.any(axis=1)).sum()) == pages.size


def test_what_failed_is_remembered_when_its_record_is_overwritten(ends: tuple[Ring, Ring]) -> None:
    sender, receiver = ends
    for number in range(1, 2 * RECORDS + 1):
        assert sender.begin(bytes(16), 0, 1, 0) == number
        if number in (1, RECORDS + 2):
            receiver.fail(number)
        finish(sender, number)
        assert receiver.next_ended() is not None
    failed = [number for number in range(1, 2 * RECORDS + 1) if sender.has_failed(number)]
    assert failed == [1, RECORDS + 2]
