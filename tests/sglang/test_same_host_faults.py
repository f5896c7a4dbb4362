"""KVARENA_SAME_HOST where something goes wrong: one warning, Mooncake instead, and never a false 0."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.engines.sglang.same_host import mooncake_hooks as same_host
from kvarena.plugin.engines.sglang.same_host.peer_session import PeerSession
from kvarena.plugin.engines.sglang.same_host.session_file import path_of
from kvarena.pool import HostVmm
from kvarena.pool.testing import FailingDriver
from kvarena.transfer import TransferFailed, TransferTimeout

pytestmark = pytest.mark.sglang

PAGE, AUX_ITEM = 512, 64


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_blocks_past_a_region_are_mooncakes_to_judge(own: Any, peer: Any, caplog: Any) -> None:
    end = peer.told["base"] + peer.told["backed"]
    over = [(own.bound.arena.base, end - PAGE, 2 * PAGE)]
    assert own.manager._transfer_data(peer.told["session"], over) != 0
    assert own.mooncake.nbytes == 2 * PAGE
    assert warnings_in(caplog) == []
    assert own.manager._transfer_data(peer.told["session"], [own.block(peer, 0, 1)]) == 0


@pytest.mark.parametrize(
    "columns",
    [([1], [1, 2], [1]), ([2**64], [1], [1]), ([1], [1], [-1]), (["x"], [1], [1]), ([], [], [])],
    ids=["lengths", "too large", "negative", "no number", "empty"],
)
def test_what_makes_no_sense_gets_stocks_answer(own: Any, peer: Any, columns: Any) -> None:
    session = peer.told["session"]
    wrapper = type(own.engine).batch_transfer_sync.__wrapped__
    expected = wrapper(own.engine, session, *columns)
    assert own.engine.batch_transfer_sync(session, *columns) == expected
    assert own.engine.batch_transfer_sync(session, *map(list, zip(own.block(peer, 0, 1)))) == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_peer_that_steps_down_and_up_is_attached_anew(
    own: Any, peer: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Late: its connection ends after it has unregistered, and a transfer comes in between."""
    session = peer.told["session"]
    assert own.manager._transfer_data(session, [own.block(peer, 0, 1)]) == 0
    if late:
        monkeypatch.setattr(PeerSession, "_lives", lambda peer_session, peer: True)
    peer.ask("step_down")
    # Neither way leads there now.
    assert own.manager._transfer_data(session, [own.block(peer, 0, 2)]) != 0
    peer.ask("step_up")
    # A refused transfer costs Mooncake a lane: wait for the aux item alone.
    assert any(own.manager._transfer_data(session, [own.aux_block(peer)]) == 0 for _ in range(3))
    before = own.path.ledger.traffic.nbytes
    assert own.manager._transfer_data(session, [own.block(peer, 5, 3)]) == 0
    assert peer.page(3) == own.page(5)
    assert own.path.ledger.traffic.nbytes == before + PAGE
    assert warnings_in(caplog) == []


def test_a_peer_that_is_being_resized_is_mooncakes_until_it_has_its_size(
    own: Any, peer: Any, caplog: Any
) -> None:
    session = peer.told["session"]
    assert own.manager._transfer_data(session, [own.block(peer, 0, 1)]) == 0
    peer.ask("let_go")
    before = own.path.ledger.traffic.nbytes, own.mooncake.nbytes
    for page in (2, 3):  # the first may find its registration gone, the second asks nobody
        assert own.manager._transfer_data(session, [own.block(peer, page, page)]) == 0
    assert (own.path.ledger.traffic.nbytes, own.mooncake.nbytes) == (before[0], before[1] + 2 * PAGE)
    peer.ask("follow")
    assert own.manager._transfer_data(session, [own.block(peer, 5, 4)]) == 0
    assert peer.page(2) + peer.page(3) + peer.page(4) == own.page(2) + own.page(3) + own.page(5)
    assert own.path.ledger.traffic.nbytes == before[0] + PAGE
    assert warnings_in(caplog) == []


def test_memory_that_cannot_be_imported_goes_by_mooncake_with_one_warning(
    rig: Any, make_side: Any, peer: Any, caplog: Any
) -> None:
    driver = FailingDriver(HostVmm(), fail_at=1, ops={"import_fd"}, forever=True)
    rig.use_driver(driver)
    side, session = make_side(), peer.told["session"]
    for page in range(3):
        assert side.manager._transfer_data(session, [side.block(peer, page, page + 1)]) == 0
        assert peer.page(page + 1) == side.page(page)
    assert side.mooncake.nbytes == 3 * PAGE
    (warned,) = warnings_in(caplog)
    assert session in warned
    assert "cannot be mapped" in warned
    assert driver.calls.count("import_fd") == 1  # a peer that is marked slow is not tried again
    driver.fail_at = None
    peer.ask("step_down")
    peer.ask("step_up")
    assert side.manager._transfer_data(session, [side.block(peer, 8, 9)]) == 0
    assert peer.page(9) == side.page(8)
    assert side.mooncake.nbytes == 3 * PAGE
    assert len(warnings_in(caplog)) == 1


def test_a_socket_that_is_gone_means_one_warning_and_mooncake(side: Any, peer: Any, caplog: Any) -> None:
    peer.ask("lose_socket")
    for page in range(2):
        assert side.manager._transfer_data(peer.told["session"], [side.block(peer, page, 30 + page)]) == 0
    assert peer.page(30, 2) == side.page(0, 2)
    assert side.mooncake.nbytes == 2 * PAGE
    assert len(warnings_in(caplog)) == 1
    peer.ask("step_down")
    peer.ask("step_up")


class Faulty:
    """The path's engine, whose copies end as a test wants; the copy itself is left out."""

    def __init__(
        self, real: Any, *, at_submit: Exception | None = None, ends: Exception | None = None
    ) -> None:
        self.real, self.at_submit, self.ends = real, at_submit, ends
        self.disconnected: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def submit(self, *given: Any) -> Any:
        if self.at_submit is not None:
            raise self.at_submit
        return self

    def wait(self, timeout: float | None = None) -> None:
        assert self.ends is not None
        raise self.ends

    def disconnect(self, key: str) -> None:
        self.disconnected.append(key)
        self.real.disconnect(key)


FAILURES = {
    "refused": {"at_submit": TransferFailed("same-host", "p", "EFAULT", "not registered")},
    "broken": {"ends": TransferFailed("same-host", "p", "copy", "an illegal address")},
    "unforeseen": {"at_submit": RuntimeError("what nobody thought of")},
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_copy_that_fails_is_carried_by_mooncake_once_and_warned_of_once(
    make_side: Any, peer: Any, caplog: Any, how: str
) -> None:
    side, session = make_side(), peer.told["session"]
    faulty = side.path._engine = Faulty(side.path._engine, **FAILURES[how])
    side.path._sessions.clear()
    blocks = [side.block(peer, 2, 3), side.aux_block(peer), side.block(peer, 4, 5)]
    assert side.manager._transfer_data(session, blocks) == 0
    assert peer.page(3) == side.page(2)
    assert peer.page(5) == side.page(4)
    # The rest first, then what the fast path did not do: no byte twice.
    assert [lengths for *_, lengths in side.mooncake.batches] == [[AUX_ITEM], [PAGE, PAGE]]
    assert len(faulty.disconnected) == 1
    assert side.path.ledger.traffic.failures == 1
    for _ in range(3):
        assert side.manager._transfer_data(session, [side.block(peer, 6, 7)]) == 0
    assert len(faulty.disconnected) == 1
    assert len(warnings_in(caplog)) == 1


def test_a_copy_that_never_ends_is_a_failure_and_not_written_twice(
    make_side: Any, peer: Any, caplog: Any
) -> None:
    """Mooncake must not write what a copy may still write: the pages could be another request's by then."""
    side = make_side()
    side.path._engine = Faulty(side.path._engine, ends=TransferTimeout("same-host", "p", 30.0))
    side.path._sessions.clear()
    assert side.manager._transfer_data(peer.told["session"], [side.block(peer, 2, 3)]) == -1
    assert side.mooncake.batches == []
    assert "may hang" in warnings_in(caplog)[-1]


def test_mooncakes_own_failure_is_the_answer_and_the_copy_has_ended(own: Any, peer: Any, caplog: Any) -> None:
    blocks = [own.block(peer, 2, 3), (own.aux.data_ptr(), peer.told["aux"] + (1 << 20), AUX_ITEM)]
    assert own.manager._transfer_data(peer.told["session"], blocks) < 0
    assert own.path.ledger.traffic.nbytes == PAGE
    assert peer.page(3) == own.page(2)
    assert warnings_in(caplog) == []


def test_a_path_that_cannot_be_made_leaves_mooncake(
    rig: Any,
    sides: Any,
    shared_engine: Any,
    switch: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: Any,
) -> None:
    tmp_path.chmod(0o755)
    assert runtime.settings is not None
    monkeypatch.setattr(
        runtime, "settings", msgspec.structs.replace(runtime.settings, socket_dir=str(tmp_path))
    )
    side = sides.Side(rig, engine=shared_engine)
    assert side.path is None
    (warned,) = warnings_in(caplog)
    assert "others can enter" in warned
    assert [ledger.engine.name for ledger in side.bound.ledgers] == ["mooncake"]
    side.close()


def test_hooks_that_sglang_did_not_apply_are_noticed(
    rig: Any, sides: Any, shared_engine: Any, switch: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    wrapper = resolve(sides.WRAPPER)
    monkeypatch.setattr(wrapper, "transfer_sync", wrapper.transfer_sync.__wrapped__)
    side = sides.Side(rig, engine=shared_engine)
    assert side.path is None
    (warned,) = warnings_in(caplog)
    assert "transfer_sync was not applied" in warned
    side.close()


def test_a_manager_of_another_shape_is_one_clear_line_and_no_reason_not_to_attach(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    manager = resolve("sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager")
    monkeypatch.setattr(manager, "add_transfer_request", property(lambda self: None))
    same_host.register_hooks(SimpleNamespace(_hooks={}, register=None), None)
    (warned,) = warnings_in(caplog)
    assert "no effect" in warned
    assert "add_transfer_request has no signature" in warned


def test_another_shape_is_one_clear_line(
    sglang: Any, sides: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(resolve(sides.WRAPPER), "transfer_sync", lambda self, session_id, blocks: 0)
    registry = SimpleNamespace(_hooks={}, register=None)
    same_host.register_hooks(registry, None)
    (warned,) = warnings_in(caplog)
    assert "no effect" in warned
    assert "transfer_sync" in warned


def test_the_peers_death_ends_in_a_code_not_in_a_hang(
    own: Any, peer: Any, sockets: Path, caplog: Any
) -> None:
    """The last of the tests, as the next one would need a new peer."""
    session = peer.told["session"]
    assert own.manager._transfer_data(session, [own.block(peer, 0, 1)]) == 0
    peer.kill()
    assert path_of(sockets, session).exists()
    began = time.monotonic()
    codes = [own.manager._transfer_data(session, [own.block(peer, 0, 1)]) for _ in range(2)]
    assert all(code < 0 for code in codes)
    assert time.monotonic() - began < 60
    assert len(warnings_in(caplog)) == 1
