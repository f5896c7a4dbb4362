"""The ledger: registered is within backed, moves are transactions, and the record says the truth."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvarena.transfer import (
    BufferInfos,
    Capabilities,
    Quiesce,
    QuiesceTimeout,
    RecordingEngine,
    Region,
    RegistrationError,
    RegistrationLedger,
)
from kvarena.transfer.registration.regions import coalesce, cut, plan_regions, seams_between, subtract
from kvarena.transfer.testing import FailingEngine

BASE = 0x7000_0000_0000
MIB = 1 << 20


def recording(**capabilities: object) -> RecordingEngine:
    wanted = {"crosses_seams": False, "spans_handles": True, "live_reregistration": True, **capabilities}
    return RecordingEngine(capabilities=Capabilities(**wanted), moves_memory=False)  # type: ignore[arg-type]


def at(offset: int, nbytes: int) -> Region:
    return Region(BASE + offset, nbytes)


def ops(engine: RecordingEngine) -> list[str]:
    return [call.op for call in engine.calls]


def test_aliases_of_one_base_become_one_region() -> None:
    engine = recording()
    infos = BufferInfos([BASE, BASE, BASE], [MIB, 4 * MIB, 0], [16384, 8192, 8192])
    RegistrationLedger(engine).move_to(infos, backed=at(0, 4 * MIB))
    assert engine.regions == (at(0, 4 * MIB),)


def test_a_pool_that_reports_its_reservation_is_clipped_to_what_is_backed() -> None:
    engine = recording()
    ledger = RegistrationLedger(engine)
    ledger.move_to(BufferInfos([BASE], [1 << 40], [16384]), backed=at(0, 3 * MIB + 4096))
    assert ledger.regions == (at(0, 3 * MIB + 4096),)
    assert ledger.registered_bytes == 3 * MIB + 4096


def test_interior_bases_and_aliases_stay_within_backed_and_go_by_their_keys() -> None:
    # Public case O13: an interior address registered with the whole segment's length.
    page, backed = 16384, 3 * MIB + 12288  # no multiple of 2 MiB
    engine = recording()
    ledger = RegistrationLedger(engine)
    ledger.move_to(
        BufferInfos([BASE + page, BASE + page, BASE + 2 * page], [backed, MIB, 2 * MIB], [page] * 3),
        backed=at(0, backed),
    )
    assert engine.regions == (at(page, backed - page),)
    ledger.clear()
    assert not engine.regions
    registered = [call.detail for call in engine.calls if call.op == "register"]
    assert [call.detail for call in engine.calls if call.op == "unregister"] == registered


@pytest.mark.parametrize("wanted", [at(MIB, 4096), at(-4096, 8192), Region(0, 4096)])
def test_a_region_that_starts_where_nothing_is_backed_is_refused(wanted: Region) -> None:
    engine = recording()
    ledger = RegistrationLedger(engine)
    ledger.move_to([at(0, MIB)], backed=at(0, MIB))
    calls, epoch = len(engine.calls), ledger.epoch
    with pytest.raises(RegistrationError, match="nothing is backed") as refused:
        ledger.move_to([wanted], backed=at(0, MIB))
    assert refused.value.region == wanted
    assert refused.value.code is None
    assert (ledger.regions, ledger.epoch, len(engine.calls)) == ((at(0, MIB),), epoch, calls)


def test_registering_more_than_is_backed_is_refused_on_demand() -> None:
    engine = recording()
    ledger = RegistrationLedger(engine)
    with pytest.raises(RegistrationError, match="ends 4096 bytes past backed memory"):
        ledger.move_to([at(0, MIB + 4096)], backed=at(0, MIB), past_backed="refuse")
    assert not ledger.regions
    assert engine.calls == []


@pytest.mark.parametrize("wanted", [Region(BASE, -1), Region(-5, 10)])
def test_negative_numbers_are_refused(wanted: Region) -> None:
    with pytest.raises(RegistrationError, match="negative"):
        RegistrationLedger(recording()).move_to([wanted], backed=at(0, MIB))


def test_pointers_and_lengths_of_different_number_are_refused() -> None:
    with pytest.raises(RegistrationError, match="2 pointers with 1 lengths"):
        RegistrationLedger(recording()).move_to(BufferInfos([BASE, BASE], [MIB], [1]), backed=at(0, MIB))


def test_the_same_wish_again_touches_nothing() -> None:
    engine = recording()
    ledger = RegistrationLedger(engine)
    for _ in range(3):
        ledger.move_to([at(0, MIB)], backed=at(0, MIB))
    assert ops(engine) == ["register"]
    assert ledger.epoch == 1


def test_finalize_replaces_the_sink_by_one_region() -> None:
    engine = recording()
    ledger = RegistrationLedger(engine)
    ledger.move_to([at(0, 2 * MIB)], backed=at(0, 2 * MIB))
    ledger.move_to([at(0, 64 * MIB)], backed=at(0, 64 * MIB))
    assert [(call.op, call.detail) for call in engine.calls] == [
        ("register", (at(0, 2 * MIB),)),
        ("unregister", (at(0, 2 * MIB),)),
        ("register", (at(0, 64 * MIB),)),
    ]
    assert ledger.seams == ()
    assert ledger.epoch == 2


def test_an_engine_that_sees_one_handle_gets_one_region_for_each() -> None:
    engine = recording(spans_handles=False)
    ledger = RegistrationLedger(engine)
    seams = (BASE + 2 * MIB, BASE + 10 * MIB, BASE + 64 * MIB)
    ledger.move_to([at(0, 32 * MIB)], backed=at(0, 32 * MIB), handle_seams=seams)
    assert ledger.regions == (at(0, 2 * MIB), at(2 * MIB, 8 * MIB), at(10 * MIB, 22 * MIB))
    assert ledger.seams == seams[:2]


def test_an_engine_that_spans_handles_gets_one_region() -> None:
    engine = recording(spans_handles=True)
    ledger = RegistrationLedger(engine)
    ledger.move_to([at(0, 32 * MIB)], backed=at(0, 32 * MIB), handle_seams=(BASE + 2 * MIB,))
    assert ledger.regions == (at(0, 32 * MIB),)


def test_the_largest_region_is_obeyed_with_aligned_pieces() -> None:
    engine = recording(max_region_bytes=MIB + 100)
    ledger = RegistrationLedger(engine)
    ledger.move_to([at(0, 3 * MIB + 4096)], backed=at(0, 4 * MIB))
    assert ledger.regions == (at(0, MIB), at(MIB, MIB), at(2 * MIB, MIB), at(3 * MIB, 4096))


def test_an_engine_that_crosses_seams_has_none() -> None:
    engine = recording(crosses_seams=True, max_region_bytes=MIB)
    ledger = RegistrationLedger(engine)
    ledger.move_to([at(0, 3 * MIB)], backed=at(0, 3 * MIB))
    assert len(ledger.regions) == 3
    assert ledger.seams == ()


def test_live_growth_adds_the_delta_and_leaves_what_is_there() -> None:
    engine = recording()
    ledger = RegistrationLedger(engine)
    ledger.move_to([at(0, 8 * MIB)], backed=at(0, 8 * MIB))
    ledger.gate.enter()  # a transfer is under way, and need not end
    ledger.move_to([at(0, 12 * MIB)], backed=at(0, 12 * MIB), live=True, quiesce_timeout=0)
    assert ledger.regions == (at(0, 8 * MIB), at(8 * MIB, 4 * MIB))
    assert ops(engine) == ["register", "register"]
    assert ledger.seams == (BASE + 8 * MIB,)


def test_live_give_back_drops_whole_regions_and_leaves_the_others() -> None:
    engine = recording()
    ledger = RegistrationLedger(engine)
    for end in (8, 12, 16):
        ledger.move_to([at(0, end * MIB)], backed=at(0, end * MIB), live=True)
    ledger.gate.enter()
    ledger.move_to([at(0, 12 * MIB)], backed=at(0, 16 * MIB), live=True, quiesce_timeout=0)
    assert ledger.regions == (at(0, 8 * MIB), at(8 * MIB, 4 * MIB))


@pytest.mark.parametrize("live_reregistration", [False, True])
def test_what_must_be_replaced_waits_for_transfers_in_flight(live_reregistration: bool) -> None:
    engine = recording(live_reregistration=live_reregistration)
    gate = Quiesce()
    ledger = RegistrationLedger(engine, gate=gate)
    ledger.move_to([at(0, 8 * MIB)], backed=at(0, 8 * MIB))
    # A region that straddles the new end cannot be shortened; without live registration nor can it grow.
    end = 4 if live_reregistration else 12
    gate.enter()
    with pytest.raises(QuiesceTimeout) as timeout:
        ledger.move_to([at(0, end * MIB)], backed=at(0, end * MIB), live=True, quiesce_timeout=0.05)
    assert timeout.value.in_flight == 1
    assert ledger.regions == engine.regions == (at(0, 8 * MIB),)
    with gate.transfer(timeout=0):  # it is open
        pass
    gate.leave()
    ledger.move_to([at(0, end * MIB)], backed=at(0, end * MIB), live=True, quiesce_timeout=0.05)
    assert ledger.regions == engine.regions == (at(0, end * MIB),)


class TestFaults:
    def test_every_step_that_fails_leaves_the_previous_regions(self) -> None:
        before, after = (at(0, 2 * MIB), at(4 * MIB, MIB)), (at(0, 8 * MIB), at(9 * MIB, MIB))
        for fail_at in itertools.count(3):
            engine = recording()
            failing = FailingEngine(engine, fail_at=fail_at, ops=("register", "unregister"))
            ledger = RegistrationLedger(failing)
            ledger.move_to(before, backed=at(0, 16 * MIB))
            epoch = ledger.epoch
            if fail_at == 7:  # past two to unregister and two to register
                ledger.move_to(after, backed=at(0, 16 * MIB))
                break
            with pytest.raises(RegistrationError) as failed:
                ledger.move_to(after, backed=at(0, 16 * MIB))
            assert (failed.value.code, failed.value.lost) == ("INJECTED", ())
            assert ledger.regions == engine.regions == before
            # They are new registrations to the engine: a peer's old keys are stale.
            assert ledger.epoch == epoch + (fail_at > 3)
            ledger.move_to(after, backed=at(0, 16 * MIB))
            assert ledger.regions == engine.regions == after

    @pytest.mark.parametrize("also", [5, 6])
    def test_a_rollback_that_fails_is_recorded_as_it_is(self, also: int) -> None:
        engine = recording()
        failing = FailingEngine(engine, fail_at={4, also}, ops=("register", "unregister"))
        ledger = RegistrationLedger(failing)
        ledger.move_to([at(0, MIB)], backed=at(0, 16 * MIB))  # call 1
        with pytest.raises(RegistrationError) as failed:
            # 2: unregister; 3: register; 4: register fails; 5: unregister the first; 6: register the old
            ledger.move_to([at(0, 2 * MIB), at(3 * MIB, MIB)], backed=at(0, 16 * MIB))
        assert failed.value.lost == (at(0, MIB),)
        assert f"{BASE:#x}" in str(failed.value)
        assert ledger.regions == engine.regions == ((at(0, 2 * MIB),) if also == 5 else ())
        ledger.clear()
        assert engine.regions == ()

    def test_an_engine_of_anybodys_that_raises_anything_is_a_registration_error(self) -> None:
        class Crude(RecordingEngine):
            def register(self, regions: object) -> None:
                raise OSError(12, "Cannot allocate memory")

        ledger = RegistrationLedger(Crude("crude"))
        with pytest.raises(RegistrationError, match="Cannot allocate memory") as failed:
            ledger.move_to([at(0, MIB)], backed=at(0, MIB))
        assert (failed.value.engine, failed.value.code) == ("crude", "OSError")
        assert ledger.regions == ()

    def test_a_region_that_somebody_else_took_away_is_struck_off(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = recording()
        ledger = RegistrationLedger(engine)
        ledger.move_to([at(0, MIB)], backed=at(0, MIB))
        engine.unregister([at(0, MIB)])
        ledger.move_to([at(0, 2 * MIB)], backed=at(0, 2 * MIB))
        assert ledger.regions == engine.regions == (at(0, 2 * MIB),)
        assert "no such registration" in caplog.text

    def test_clear_takes_back_what_it_can_and_names_the_rest(self) -> None:
        engine = recording()
        ledger = RegistrationLedger(FailingEngine(engine, fail_at=2, ops=("unregister",)))
        regions = (at(0, MIB), at(2 * MIB, MIB), at(4 * MIB, MIB))
        ledger.move_to(regions, backed=at(0, 8 * MIB))
        with pytest.raises(RegistrationError) as failed:
            ledger.clear()
        assert failed.value.region == regions[1]
        assert ledger.regions == engine.regions == (regions[1],)

    def test_a_listener_that_raises_changes_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = recording()

        def raises(*_: object) -> None:
            raise ValueError("from a listener")

        ledger = RegistrationLedger(engine, on_change=raises)
        ledger.move_to([at(0, MIB)], backed=at(0, MIB))
        assert ledger.regions == engine.regions == (at(0, MIB),)
        assert "from a listener" in caplog.text


def test_listeners_hear_what_happened_in_order_rollbacks_too() -> None:
    engine = FailingEngine(recording(), fail_at=4, ops=("register", "unregister"))
    heard: list[tuple[str, Region]] = []
    ledger = RegistrationLedger(engine, on_change=lambda change, _, region: heard.append((change, region)))
    ledger.move_to([at(0, MIB)], backed=at(0, 8 * MIB))
    with pytest.raises(RegistrationError):
        ledger.move_to([at(0, 2 * MIB), at(4 * MIB, MIB)], backed=at(0, 8 * MIB))
    assert heard == [
        ("registered", at(0, MIB)),
        ("unregistered", at(0, MIB)),
        ("registered", at(0, 2 * MIB)),
        ("unregistered", at(0, 2 * MIB)),
        ("registered", at(0, MIB)),
    ]


class TestWithdrawing:
    def test_a_range_is_withdrawn_while_its_memory_is_replaced_and_registered_anew(self) -> None:
        engine = recording()
        ledger = RegistrationLedger(engine)
        ledger.move_to([at(0, 2 * MIB)], backed=at(0, 2 * MIB))
        assert ledger.withdraw() == (at(0, 2 * MIB),)
        assert engine.regions == ()
        # Even to the same size: the memory is another.
        ledger.move_to([at(0, 2 * MIB)], backed=at(0, 2 * MIB))
        assert ops(engine) == ["register", "unregister", "register"]

    def test_it_comes_back_when_replacing_the_memory_failed(self) -> None:
        engine = recording()
        ledger = RegistrationLedger(engine)
        ledger.move_to([at(0, 2 * MIB), at(4 * MIB, MIB)], backed=at(0, 8 * MIB))
        taken = ledger.withdraw(at(0, MIB))
        assert engine.regions == (at(4 * MIB, MIB),)
        ledger.restore(taken)
        assert ledger.regions == engine.regions == (at(0, 2 * MIB), at(4 * MIB, MIB))


def test_moves_from_several_threads_do_not_mix() -> None:
    engine = recording()
    ledger = RegistrationLedger(engine)
    failures: list[RegistrationError] = []

    def move(end: int) -> None:
        try:
            for i in range(40):
                ledger.move_to([at(0, (end + i % 3) * MIB)], backed=at(0, 64 * MIB))
        except RegistrationError as error:
            failures.append(error)

    threads = [threading.Thread(target=move, args=(end,)) for end in (1, 5, 9, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert ledger.regions == engine.regions
    assert len(engine.regions) == 1


class TestRegionArithmetic:
    regions = st.lists(st.builds(Region, st.integers(0, 60), st.integers(0, 20)), max_size=6)

    @staticmethod
    def bytes_of(regions: tuple[Region, ...] | list[Region]) -> set[int]:
        return {byte for region in regions for byte in range(region.address, region.end)}

    @given(regions)
    def test_coalescing_keeps_the_bytes_in_the_fewest_regions(self, regions: list[Region]) -> None:
        merged = coalesce(regions)
        assert self.bytes_of(merged) == self.bytes_of(regions)
        assert all(a.end < b.address for a, b in itertools.pairwise(merged))

    @given(regions, regions)
    def test_subtracting_leaves_the_other_bytes(self, regions: list[Region], taken: list[Region]) -> None:
        assert self.bytes_of(subtract(regions, taken)) == self.bytes_of(regions) - self.bytes_of(taken)

    @given(regions, st.lists(st.integers(0, 90), max_size=5))
    def test_cutting_keeps_the_bytes_and_crosses_no_seam(
        self, regions: list[Region], seams: list[int]
    ) -> None:
        pieces = cut(coalesce(regions), seams)
        assert self.bytes_of(pieces) == self.bytes_of(regions)
        assert not any(piece.address < seam < piece.end for piece in pieces for seam in seams)

    @given(
        regions,
        st.integers(1, 60),
        st.lists(st.integers(0, 90), max_size=4),
        st.booleans(),
        st.none() | st.integers(1, 30),
    )
    def test_a_plan_covers_what_is_wanted_and_backed_and_obeys_the_engine(
        self, regions: list[Region], end: int, seams: list[int], spans: bool, limit: int | None
    ) -> None:
        backed = Region(0, end)
        wanted = [region for region in regions if region.address < end]
        capabilities = Capabilities(crosses_seams=False, spans_handles=spans, max_region_bytes=limit)
        plan = plan_regions(wanted, backed=backed, capabilities=capabilities, handle_seams=seams)
        assert self.bytes_of(plan) == self.bytes_of(wanted) & set(range(end))
        assert sum(region.nbytes for region in plan) == len(self.bytes_of(plan))
        assert limit is None or all(region.nbytes <= limit for region in plan)
        assert spans or not any(r.address < seam < r.end for r in plan for seam in seams)

    def test_seams_are_where_regions_meet(self) -> None:
        assert seams_between([Region(0, 5), Region(5, 5), Region(12, 3)]) == (5,)


def test_a_gate_that_nobody_entered_cannot_be_left() -> None:
    with pytest.raises(RuntimeError):
        Quiesce().leave()


def test_newcomers_wait_while_a_gate_is_closed() -> None:
    gate = Quiesce()
    with gate.closed(), pytest.raises(QuiesceTimeout, match="did not open"):
        gate.enter(timeout=0.01)
    with gate.transfer():
        assert gate.in_flight == 1
    assert gate.in_flight == 0


def test_a_closer_waits_for_those_inside() -> None:
    gate = Quiesce()
    gate.enter()
    closed = threading.Event()

    def close() -> None:
        with gate.closed(timeout=10):
            closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    assert not closed.wait(0.05)
    gate.leave()
    assert closed.wait(10)
    thread.join()
