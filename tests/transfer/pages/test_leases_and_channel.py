"""Leases, and the channel that checks them: nothing is written that the receiver did not lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from kvarena.transfer import (
    ArenaPages,
    Lease,
    LeaseError,
    LeaseTable,
    Manifest,
    ManifestMismatch,
    PageChannel,
    PageError,
    PageMoves,
    Pending,
    Quiesce,
    QuiesceTimeout,
    RecordingEngine,
    RegistrationLedger,
    SubPoolManifest,
    TransferEngine,
    TransferFailed,
    TransferTimeout,
)
from kvarena.transfer.pages import channel as channel_module
from kvarena.transfer.testing import FailingEngine, HostMemory, assert_same_bytes

PAGE = 4096
PAGES = 64
MANIFEST = Manifest(
    sub_pools=(
        SubPoolManifest(name="full", page_bytes=PAGE, page_size=1, layers=(0,), dtype="bfloat16"),
        SubPoolManifest(name="swa", page_bytes=2 * PAGE, page_size=1, layers=(1,), dtype="bfloat16"),
    )
)


class TestLease:
    lease = Lease(request="r", serial=1, epoch=3, pages={"full": (4, 5, 9)})

    def test_its_pages_may_be_written(self) -> None:
        self.lease.check("full", [9, 4], epoch=3)
        self.lease.check("full", [])

    def test_no_other_page_may(self) -> None:
        with pytest.raises(LeaseError, match="2 pages of 'full' are not leased, page 6 first"):
            self.lease.check("full", [4, 6, 8])
        with pytest.raises(LeaseError, match="nothing of sub-pool 'swa'"):
            self.lease.check("swa", [4])

    def test_a_peer_known_as_it_was_before_the_lease_must_be_asked_again(self) -> None:
        self.lease.check("full", [4], epoch=4)
        with pytest.raises(LeaseError, match="epoch 3, but the peer is known as of epoch 2"):
            self.lease.check("full", [4], epoch=2)

    def test_it_travels(self) -> None:
        assert Lease.decode(self.lease.encode()) == self.lease
        for encoded in (b"", b"\xc1", msgspec.msgpack.encode({"request": "r"})):
            with pytest.raises(LeaseError, match="unreadable"):
                Lease.decode(encoded)


class TestLeaseTable:
    def test_a_page_is_leased_once_at_a_time(self) -> None:
        table = LeaseTable()
        first = table.grant("a", {"full": [1, 2], "swa": [1]}, epoch=1)
        with pytest.raises(LeaseError, match="page 2 of 'full' is leased to a"):
            table.grant("b", {"full": [3, 2]}, epoch=1)
        assert table.active == (first,)
        table.grant("b", {"full": [3], "swa": [2]}, epoch=1)
        assert table.complete("a", first.serial) == first
        table.grant("c", {"full": [1, 2]}, epoch=1)

    @pytest.mark.parametrize(
        "pages",
        [
            {"full": [3, 3]},
            {"full": [-1]},
            {"full": [1 << 63]},
            {"full": [1.5]},
            {"full": ["x"]},
            {"full": np.array([[3, 4]])},
            {"full": np.array([0.5])},
        ],
    )
    def test_pages_that_make_no_sense_are_not_leased(self, pages: dict[str, Any]) -> None:
        table = LeaseTable()
        with pytest.raises(LeaseError):
            table.grant("a", {"swa": [1], **pages}, epoch=1)
        assert table.active == ()
        table.grant("b", {"swa": [1]}, epoch=1)

    def test_a_lease_is_the_same_whatever_its_pages_came_in(self) -> None:
        ids = [5, 1 << 40, (1 << 63) - 1]
        for pages in (
            ids,
            tuple(ids),
            np.array(ids),
            iter(ids),
            dict.fromkeys(ids),
            np.array(ids, np.uint64),
        ):
            table = LeaseTable()
            lease = table.grant("a", {"full": pages}, epoch=np.int64(1))
            assert lease == Lease(request="a", serial=1, epoch=1, pages={"full": tuple(ids)})
            assert Lease.decode(lease.encode()) == lease

    def test_a_request_has_one_lease(self) -> None:
        table = LeaseTable()
        lease = table.grant("a", {"full": [1]}, epoch=1)
        with pytest.raises(LeaseError, match=f"has lease {lease.serial} already"):
            table.grant("a", {"full": [2]}, epoch=1)

    def test_a_lease_ends_once(self) -> None:
        table = LeaseTable()
        lease = table.grant("a", {"full": [1]}, epoch=1)
        table.complete("a", lease.serial)
        with pytest.raises(LeaseError, match="is not out"):
            table.complete("a", lease.serial)
        again = table.grant("a", {"full": [1]}, epoch=1)
        assert again.serial != lease.serial
        with pytest.raises(LeaseError, match="is not out"):
            table.complete("a", lease.serial)  # a late message about the first one
        assert table.active == (again,)

    def test_a_revoked_lease_is_answered_by_its_reason(self) -> None:
        table = LeaseTable()
        lease = table.grant("a", {"full": [1]}, epoch=1)
        assert table.revoke("a", "the client went away") == lease
        assert table.revoke("a", "again") is None
        with pytest.raises(LeaseError, match="the client went away"):
            table.complete("a", lease.serial)
        table.grant("b", {"full": [1]}, epoch=1)

    def test_leases_hold_the_gate(self) -> None:
        gate = Quiesce()
        table = LeaseTable(gate=gate)
        lease = table.grant("a", {"full": [1]}, epoch=1)
        with pytest.raises(LeaseError):
            table.grant("b", {"full": [1]}, epoch=1)
        table.grant("c", {"full": [2]}, epoch=1)
        assert gate.in_flight == 2
        table.complete("a", lease.serial)
        table.revoke("c", "gone")
        with gate.closed(timeout=0), pytest.raises(QuiesceTimeout):
            table.grant("d", {"full": [3]}, epoch=1, gate_timeout=0.01)
        assert gate.in_flight == 0
        table.grant("d", {"full": [3]}, epoch=1)

    def test_a_tail_drains_before_it_is_given_back(self) -> None:
        table = LeaseTable()
        table.grant("low", {"full": [3], "swa": [3]}, epoch=1)
        high = table.grant("high", {"full": [3 + 5], "swa": [4]}, epoch=1)
        with pytest.raises(QuiesceTimeout) as timeout:
            table.drain_tail({"full": 8, "swa": 5}, timeout=0.02)
        assert timeout.value.in_flight == 1
        table.grant("also high", {"full": [9]}, epoch=1)  # a drain that failed limits nothing
        table.revoke("also high", "test")

        drained = threading.Event()

        def drain() -> None:
            table.drain_tail({"full": 8, "swa": 5}, timeout=10)
            drained.set()

        thread = threading.Thread(target=drain)
        thread.start()
        assert not drained.wait(0.05)
        with pytest.raises(LeaseError, match="page 9 of 'full' is being given back"):
            table.grant("later", {"full": [9]}, epoch=1)
        table.complete("high", high.serial)
        assert drained.wait(10)
        thread.join()
        with pytest.raises(LeaseError, match="being given back"):
            table.grant("later", {"swa": [5]}, epoch=1)
        table.open_tail()
        table.grant("later", {"full": [9], "swa": [5]}, epoch=1)


class Side:
    """One side of a channel over memory of this process."""

    def __init__(self, engine: TransferEngine) -> None:
        self.memory = HostMemory(PAGES * PAGE, PAGES * PAGE)
        self.gate = Quiesce()
        self.ledger = RegistrationLedger(engine, gate=self.gate)
        self.ledger.move_to([self.memory.backed], backed=self.memory.backed)
        base = self.memory.base
        self.channel = PageChannel(
            self.ledger,
            MANIFEST,
            lambda: {"full": ArenaPages(base, PAGES), "swa": ArenaPages(base, PAGES // 2)},
        )
        self.leases = LeaseTable()


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(engine: TransferEngine | None = None) -> Side:
        made.append(Side(engine or RecordingEngine()))
        return made[-1]

    yield make
    for side in made:
        side.ledger.engine.close()
        side.memory.close()


def submitted(engine: TransferEngine) -> int:
    assert isinstance(engine, RecordingEngine)
    return sum(call.op == "submit" for call in engine.calls)


def test_leased_pages_of_both_sub_pools_arrive(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side(), make_side()
    prefill.memory.write(2 * PAGE, b"f" * PAGE)
    prefill.memory.write(5 * 2 * PAGE, b"s" * 2 * PAGE)
    lease = decode.leases.grant("r", {"full": [7], "swa": [9]}, epoch=decode.ledger.epoch)
    peer = prefill.channel.connect(decode.channel.hello())
    pending = prefill.channel.send(peer, lease, {"full": PageMoves([2], [7]), "swa": PageMoves([5], [9])})
    assert prefill.gate.in_flight == 1
    assert pending.done()
    assert prefill.gate.in_flight == 0
    assert_same_bytes(decode.memory.read(7 * PAGE, PAGE), b"f" * PAGE)
    assert_same_bytes(decode.memory.read(9 * 2 * PAGE, 2 * PAGE), b"s" * 2 * PAGE)
    assert_same_bytes(decode.memory.read(8 * PAGE, PAGE), bytes(PAGE))
    traffic = prefill.ledger.traffic
    assert pending.done()  # asked again, it does not count again
    assert (traffic.transfers, traffic.nbytes, traffic.failures) == (1, 3 * PAGE, 0)


@pytest.mark.parametrize(
    ("moves", "error"),
    [
        ({"full": PageMoves([1], [8])}, LeaseError),
        ({"swa": PageMoves([1], [7])}, LeaseError),
        ({"full": PageMoves([PAGES], [7])}, PageError),
        ({"full": PageMoves([1, 2], [7])}, PageError),
    ],
)
def test_what_may_not_be_written_never_reaches_the_engine(
    make_side: Callable[..., Side], moves: dict[str, PageMoves], error: type[Exception]
) -> None:
    prefill, decode = make_side(), make_side()
    lease = decode.leases.grant("r", {"full": [7]}, epoch=decode.ledger.epoch)
    peer = prefill.channel.connect(decode.channel.hello())
    with pytest.raises(error):
        prefill.channel.send(peer, lease, moves)
    assert submitted(prefill.ledger.engine) == 0
    assert prefill.gate.in_flight == 0


def test_a_sub_pool_that_does_not_exist_is_refused(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side(), make_side()
    lease = decode.leases.grant("r", {"ghost": [7]}, epoch=decode.ledger.epoch)
    peer = prefill.channel.connect(decode.channel.hello())
    with pytest.raises(PageError, match="no sub-pool 'ghost', only"):
        prefill.channel.send(peer, lease, {"ghost": PageMoves([1], [7])})
    assert prefill.gate.in_flight == 0


def test_a_hello_that_is_said_while_the_ledger_moves_is_not_taken_for_newer_than_it_is(
    make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_side(), make_side()
    describe = decode.ledger.engine.describe

    def describe_and_move() -> bytes:
        said = describe()
        decode.ledger.move_to([decode.memory.backed._replace(nbytes=32 * PAGE)], backed=decode.memory.backed)
        return said

    monkeypatch.setattr(decode.ledger.engine, "describe", describe_and_move)
    peer = prefill.channel.connect(decode.channel.hello())
    lease = decode.leases.grant("r", {"full": [7]}, epoch=decode.ledger.epoch)
    with pytest.raises(LeaseError, match="known as of epoch 1"):
        prefill.channel.send(peer, lease, {"full": PageMoves([1], [7])})


def test_a_leased_page_that_has_no_memory_is_refused(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side(), make_side()
    lease = decode.leases.grant("r", {"full": [PAGES]}, epoch=decode.ledger.epoch)
    peer = prefill.channel.connect(decode.channel.hello())
    with pytest.raises(PageError, match=f"destination page {PAGES} does not exist"):
        prefill.channel.send(peer, lease, {"full": PageMoves([1], [PAGES])})


def test_a_lease_newer_than_the_last_hello_needs_another(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side(), make_side()
    peer = prefill.channel.connect(decode.channel.hello())
    decode.ledger.move_to([decode.memory.backed._replace(nbytes=32 * PAGE)], backed=decode.memory.backed)
    lease = decode.leases.grant("r", {"full": [7]}, epoch=decode.ledger.epoch)
    with pytest.raises(LeaseError, match="known as of epoch 1"):
        prefill.channel.send(peer, lease, {"full": PageMoves([1], [7])})
    assert prefill.channel.connect(decode.channel.hello()) == peer
    prefill.channel.send(peer, lease, {"full": PageMoves([1], [7])}).wait(1)


def test_a_submission_that_fails_is_told_to_the_receiver_at_once(make_side: Callable[..., Side]) -> None:
    # Public case O11: the second of three batches cannot be posted.
    engine = RecordingEngine()
    prefill, decode = make_side(FailingEngine(engine, fail_at=2, ops=("submit",))), make_side()
    peer = prefill.channel.connect(decode.channel.hello())
    free = set(range(1, PAGES))
    to_decode: list[tuple[str, str]] = []
    for i in range(3):
        request, page = f"r{i}", 10 + i
        free.discard(page)
        lease = decode.leases.grant(request, {"full": [page]}, epoch=decode.ledger.epoch)
        try:
            prefill.channel.send(peer, lease, {"full": PageMoves([1], [page])}).wait(1)
            to_decode.append((request, "done"))
        except TransferFailed as error:
            to_decode.append((str(error.request), f"{error.code} to {error.peer}"))
    for request, what in to_decode:
        if what == "done":
            lease = next(lease for lease in decode.leases.active if lease.request == request)
            decode.leases.complete(request, lease.serial)
        else:
            revoked = decode.leases.revoke(request, what)
            assert revoked is not None
            free.update(revoked.pages["full"])
    assert to_decode == [("r0", "done"), ("r1", f"INJECTED to {peer}"), ("r2", "done")]
    assert decode.leases.active == ()
    assert free == set(range(1, PAGES)) - {10, 12}
    assert prefill.gate.in_flight == 0


class Held:
    """A transfer that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: TransferFailed | None = None

    def done(self) -> bool:
        if self.ended.is_set() and self.error:
            raise self.error
        return self.ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        if not self.ended.wait(timeout):
            raise TransferTimeout("holding", "peer", timeout or 0)
        self.done()


class HoldingEngine(RecordingEngine):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []

    def submit(self, *_: object) -> Pending:
        self.held.append(Held())
        return self.held[-1]


class TestInFlight:
    @pytest.fixture
    def sides(self, make_side: Callable[..., Side]) -> tuple[Side, Side, HoldingEngine, Lease, str]:
        engine = HoldingEngine()
        prefill, decode = make_side(engine), make_side()
        lease = decode.leases.grant("r", {"full": [7]}, epoch=decode.ledger.epoch)
        return prefill, decode, engine, lease, prefill.channel.connect(decode.channel.hello())

    MOVES = {"full": PageMoves([1], [7])}  # noqa: RUF012

    def test_a_failure_later_on_names_the_request_and_leaves_the_gate(
        self, sides: tuple[Side, Side, HoldingEngine, Lease, str]
    ) -> None:
        prefill, _, engine, lease, peer = sides
        pending = prefill.channel.send(peer, lease, self.MOVES)
        assert not pending.done()
        engine.held[0].error = TransferFailed("holding", peer, -1, "reset")
        engine.held[0].ended.set()
        with pytest.raises(TransferFailed, match="request r failed with -1") as failed:
            pending.done()
        assert failed.value.request == "r"
        assert prefill.gate.in_flight == 0
        traffic = prefill.ledger.traffic
        assert (traffic.transfers, traffic.nbytes, traffic.failures) == (1, 0, 1)

    def test_a_timeout_stays_in_flight_until_the_peer_is_disconnected(
        self, sides: tuple[Side, Side, HoldingEngine, Lease, str]
    ) -> None:
        prefill, _, _, lease, peer = sides
        pending = prefill.channel.send(peer, lease, self.MOVES)
        with pytest.raises(TransferTimeout, match=r"for request r did not end within 0\.01 s"):
            pending.wait(0.01)
        assert prefill.gate.in_flight == 1
        prefill.channel.disconnect(peer)
        assert prefill.gate.in_flight == 0
        with pytest.raises(TransferFailed, match="not connected"):
            prefill.channel.send(peer, lease, self.MOVES)

    def test_revoking_waits_for_what_is_being_written_and_stops_the_rest(
        self, sides: tuple[Side, Side, HoldingEngine, Lease, str]
    ) -> None:
        prefill, decode, engine, lease, peer = sides
        pending = prefill.channel.send(peer, lease, self.MOVES)
        with pytest.raises(TransferTimeout):
            prefill.channel.revoke(peer, "r", lease.serial, timeout=0.01)
        with pytest.raises(LeaseError, match="was revoked"):
            prefill.channel.send(peer, lease, self.MOVES)
        engine.held[0].ended.set()
        prefill.channel.revoke(peer, "r", lease.serial, timeout=1)
        assert pending.done()
        decode.leases.revoke("r", "test")
        again = decode.leases.grant("r", {"full": [7]}, epoch=decode.ledger.epoch)
        prefill.channel.send(peer, again, self.MOVES)
        assert prefill.gate.in_flight == 1

    def test_revoking_waits_for_what_is_just_being_submitted(
        self, sides: tuple[Side, Side, HoldingEngine, Lease, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It found the lease good, and writes in a moment: the receiver must not be told yet."""
        prefill, _, engine, lease, peer = sides
        submit = engine.submit

        def revoked_meanwhile(*arguments: Any) -> Pending:
            with pytest.raises(TransferTimeout):
                prefill.channel.revoke(peer, "r", lease.serial, timeout=0.01)
            return submit(*arguments)

        monkeypatch.setattr(engine, "submit", revoked_meanwhile)
        pending = prefill.channel.send(peer, lease, self.MOVES)
        engine.held[0].ended.set()
        prefill.channel.revoke(peer, "r", lease.serial, timeout=1)
        assert pending.done()
        assert prefill.gate.in_flight == 0

    def test_the_last_that_were_revoked_are_remembered(
        self, sides: tuple[Side, Side, HoldingEngine, Lease, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill, _, _, lease, peer = sides
        monkeypatch.setattr(channel_module, "_REMEMBERED", 2)
        for request in ("x", "y", "r"):
            prefill.channel.revoke(peer, request, lease.serial)
        assert [request for _, request, _ in prefill.channel._revoked] == ["y", "r"]
        with pytest.raises(LeaseError, match="was revoked"):
            prefill.channel.send(peer, lease, self.MOVES)

    def test_revoking_does_not_wait_for_what_was_refused(
        self, sides: tuple[Side, Side, HoldingEngine, Lease, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill, _, engine, lease, peer = sides

        def refuse(*_: Any) -> Pending:
            raise TransferFailed("holding", peer, -1, "no")

        monkeypatch.setattr(engine, "submit", refuse)
        with pytest.raises(TransferFailed):
            prefill.channel.send(peer, lease, self.MOVES)
        assert prefill.gate.in_flight == 0
        prefill.channel.revoke(peer, "r", lease.serial, timeout=0)

    def test_a_registration_is_not_replaced_under_a_transfer(
        self, sides: tuple[Side, Side, HoldingEngine, Lease, str]
    ) -> None:
        prefill, _, engine, lease, peer = sides
        prefill.channel.send(peer, lease, self.MOVES)
        before = engine.regions
        half = before[0]._replace(nbytes=before[0].nbytes // 2)
        with pytest.raises(QuiesceTimeout):
            prefill.ledger.move_to([half], backed=before[0], live=True, quiesce_timeout=0.01)
        assert engine.regions == before


def test_what_is_no_hello_is_refused(make_side: Callable[..., Side]) -> None:
    side = make_side()
    for hello in (b"", b"\xc1", b"\x80"):
        with pytest.raises(ManifestMismatch, match="hello"):
            side.channel.connect(hello)
    assert [call.op for call in side.ledger.engine.calls] == ["register"]  # type: ignore[attr-defined]


def test_an_unknown_peer_is_refused_by_name(make_side: Callable[..., Side]) -> None:
    lease = Lease(request="r", serial=1, epoch=1, pages={"full": (7,)})
    with pytest.raises(TransferFailed, match=r"to nobody for request r failed: not connected"):
        make_side().channel.send("nobody", lease, {"full": PageMoves([1], [7])})
