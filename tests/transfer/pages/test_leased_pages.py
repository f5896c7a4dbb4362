"""Engines that take leased pages: what a channel hands to them, and several parts as one transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvarena.transfer import (
    ArenaPages,
    Lease,
    LeasedPageEngine,
    LeaseError,
    Manifest,
    PageBatch,
    PageChannel,
    PageMoves,
    RecordingEngine,
    Region,
    RegistrationLedger,
    SubPoolManifest,
    TransferFailed,
    TransferTimeout,
)
from kvarena.transfer.pages.leased_pages import JoinedPending
from kvarena.transfer.testing.recording import FinishedTransfer

MANIFEST = Manifest(
    sub_pools=tuple(
        SubPoolManifest(name=name, page_bytes=nbytes, page_size=1, layers=(0,), dtype="uint8")
        for name, nbytes in (("full", 64), ("swa", 128))
    )
)
LEASE = Lease(request="r", serial=1, epoch=1, pages={"full": (3, 4), "swa": (1,)})
MOVES = {"full": PageMoves([0, 1], [3, 4]), "swa": PageMoves([5], [1])}


class Leasing(RecordingEngine):
    """Takes pages, and refuses those of one sub-pool."""

    def __init__(self, refused: str = "") -> None:
        super().__init__(moves_memory=False)
        self.refused = refused
        self.got: list[tuple[Any, ...]] = []

    def submit_pages(self, peer: str, batch: PageBatch) -> FinishedTransfer:
        if batch.sub_pool == self.refused:
            raise TransferFailed(self.name, peer, "NO", "refused")
        self.got.append(
            (
                batch.sub_pool,
                batch.src,
                batch.dst,
                batch.page_bytes,
                batch.lease.serial,
                batch.src_base,
                batch.dst_base,
            )
        )
        return FinishedTransfer()

    def admit(self, peer: str, lease: Lease) -> None:
        self.got.append(("admit", peer, lease.serial))

    def expect(self, lease: Lease) -> FinishedTransfer:
        return FinishedTransfer()

    def revoke(self, lease: Lease, why: str = "") -> None:
        self.got.append(("revoke", lease.serial, why))


def _channel(engine: RecordingEngine, base: int) -> PageChannel:
    ledger = RegistrationLedger(engine)
    region = Region(base, 4096)
    ledger.move_to([region], backed=region)
    pages = {"full": ArenaPages(base, 64), "swa": ArenaPages(base, 32)}
    return PageChannel(ledger, MANIFEST, lambda: pages)


@pytest.fixture
def connected() -> Callable[..., tuple[PageChannel, Leasing, str]]:
    keep: list[PageChannel] = []

    def make(refused: str = "") -> tuple[PageChannel, Leasing, str]:
        engine = Leasing(refused)
        sender, receiver = _channel(engine, 1 << 20), _channel(Leasing(), 1 << 24)
        keep.append(receiver)
        return sender, engine, sender.connect(receiver.hello())

    return make


def test_pages_go_with_their_lease_and_bases(
    connected: Callable[..., tuple[PageChannel, Leasing, str]],
) -> None:
    channel, engine, peer = connected()
    assert isinstance(engine, LeasedPageEngine)
    channel.admit(peer, LEASE)
    assert channel.send(peer, LEASE, MOVES).done()
    assert engine.got == [
        ("admit", peer, 1),
        ("full", [0, 1], [3, 4], 64, 1, 1 << 20, 1 << 24),
        ("swa", [5], [1], 128, 1, 1 << 20, 1 << 24),
    ]
    assert channel.ledger.gate.in_flight == 0


def test_pages_that_are_not_leased_never_reach_the_engine(
    connected: Callable[..., tuple[PageChannel, Leasing, str]],
) -> None:
    channel, engine, peer = connected()
    with pytest.raises(LeaseError, match="page 9"):
        channel.send(peer, LEASE, {"full": PageMoves([0], [9])})
    assert engine.got == []
    assert channel.ledger.gate.in_flight == 0


def test_a_refusal_of_the_first_part_is_raised_and_of_a_later_one_told_at_the_end(
    connected: Callable[..., tuple[PageChannel, Leasing, str]],
) -> None:
    channel, engine, peer = connected("full")
    with pytest.raises(TransferFailed, match="refused"):
        channel.send(peer, LEASE, MOVES)
    assert engine.got == []
    channel, engine, peer = connected("swa")
    pending = channel.send(peer, LEASE, MOVES)
    assert len(engine.got) == 1
    with pytest.raises(TransferFailed, match="refused"):
        pending.done()
    assert channel.ledger.gate.in_flight == 0
    assert channel.ledger.traffic.failures == 1


def test_a_receiver_can_expect_and_take_back_only_where_the_engine_can() -> None:
    engine = Leasing()
    channel = _channel(engine, 1 << 20)
    assert channel.expect(LEASE) is not None
    channel.take_back(LEASE, "over")
    assert engine.got == [("revoke", 1, "over")]
    plain = _channel(RecordingEngine(moves_memory=False), 1 << 21)
    assert plain.leased is None
    assert plain.expect(LEASE) is None
    plain.take_back(LEASE, "over")


class Part:
    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)

    def done(self) -> bool:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, timeout: float | None = None) -> None:
        if not self.done():
            raise TransferTimeout("e", "p", timeout or 0.0)


def test_a_failure_is_told_only_when_no_part_writes_any_more() -> None:
    failed = TransferFailed("e", "p", "NO", "broken")
    joined = JoinedPending([Part(failed), Part(False, False, True)])
    assert not joined.done()
    assert not joined.done()
    with pytest.raises(TransferFailed, match="broken"):
        joined.done()
    with pytest.raises(TransferFailed, match="broken"):
        joined.wait(1.0)


def test_who_asks_at_the_same_time_takes_no_part_for_ended() -> None:
    """One thread polls, and another one waits for a lease that was revoked."""

    class Asked(Part):
        def done(self) -> bool:
            if not self.answers:
                return True
            self.answers.clear()
            assert not joined.done()  # another thread, in between
            return True

    last = Part(False, False, True)
    joined = JoinedPending([Asked(True), last])
    assert not joined.done()
    assert joined.done()
    assert last.answers == [True]


def test_waiting_for_parts() -> None:
    JoinedPending([Part(True), Part(True)]).wait(1.0)
    with pytest.raises(TransferTimeout):
        JoinedPending([Part(True), Part(False)]).wait(0.0)
    with pytest.raises(TransferFailed, match="first"):
        JoinedPending(
            [Part(TransferFailed("e", "p", 1, "first")), Part(TransferFailed("e", "p", 1, "second"))]
        ).wait(1.0)
