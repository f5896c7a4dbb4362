"""KVARENA_SAME_HOST: SGLang's own calls, real Mooncake TCP, two processes; who carried what is counted."""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kvarena.plugin.engines.sglang import same_host
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.engines.sglang.same_host_card import Card, path_of
from kvarena.plugin.engines.sglang.shapes import resolve
from kvarena.pool import HostVmm
from kvarena.pool.testing import FailingDriver, no_leaks
from kvarena.transfer import Region, TransferFailed, TransferTimeout

pytestmark = pytest.mark.sglang

PAGE, AUX_ITEM = 512, 64


class Spy:
    """SGLang's raw Mooncake engine; writes down what is given to it."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.batches: list[tuple[str, list[int], list[int], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def batch_transfer_sync_write(
        self, session: str, src: list[int], dst: list[int], lengths: list[int]
    ) -> int:
        self.batches.append((session, src, dst, lengths))
        return int(self.real.batch_transfer_sync_write(session, src, dst, lengths))

    def transfer_sync_write(self, session: str, src: int, dst: int, length: int) -> int:
        self.batches.append((session, [src], [dst], [length]))
        return int(self.real.transfer_sync_write(session, src, dst, length))

    @property
    def nbytes(self) -> int:
        return sum(sum(lengths) for *_, lengths in self.batches)


@pytest.fixture(scope="module")
def helper(load_helper: Callable[[str], Any]) -> Any:
    pytest.importorskip("mooncake.engine", reason="no Mooncake", exc_type=ImportError)
    return load_helper("same_host_side")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sh")
    made.chmod(0o700)
    return made


@pytest.fixture(scope="module")
def peers(helper: Any, directory: Path) -> Iterator[list[Any]]:
    """Importing SGLang takes seconds: one process serves all tests until one kills it.

    Does not ask for SGLang here, so that both processes import it at the same time.
    """
    started = [helper.Peer(os.environ["KVARENA_CONTRACT_RELEASE"], directory)]
    yield started
    for peer in started:
        peer.close()


@pytest.fixture(scope="module")
def sides(peers: list[Any], helper: Any, request: pytest.FixtureRequest) -> Any:
    registry = request.getfixturevalue("sglang").registry
    # What attach() does when the setting is there; the peer process goes that way.
    same_host.register_hooks(registry, resolve("sglang.srt.plugins.hook_registry.HookType").AROUND)
    registry.apply_hooks()
    return helper


@pytest.fixture
def peer(peers: list[Any], sides: Any, sglang: Any, directory: Path) -> Any:
    if peers[-1].process.poll() is not None:
        peers.append(sides.Peer(sglang.version, directory))
    if not peers[-1].told:
        peers[-1].wait()
    peers[-1].ask("clear")
    return peers[-1]


@pytest.fixture
def switch(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.settings is not None
    changed = msgspec.structs.replace(
        runtime.settings, same_host=True, socket_dir=str(directory), transfer_timeout=5.0
    )
    monkeypatch.setattr(runtime, "settings", changed)


@pytest.fixture(scope="module")
def shared_engine(sides: Any) -> Any:
    """An engine of Mooncake's takes a second to go."""
    return resolve(sides.WRAPPER)("127.0.0.1")


@pytest.fixture
def make_side(sides: Any, rig: Any, switch: None, shared_engine: Any) -> Iterator[Callable[..., Any]]:
    made = []

    def make(*, own_engine: bool = False, **options: Any) -> Any:
        """`own_engine`: after a refused transfer, Mooncake may refuse the next one, too."""
        side = sides.Side(rig, engine=None if own_engine else shared_engine, **options)
        raw = getattr(side.engine.engine, "real", side.engine.engine)
        side.engine.engine = side.spy = Spy(raw)
        side.bytes.copy_(
            torch.randint(
                0, 256, side.bytes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
            )
        )
        side.aux.copy_(torch.arange(side.aux.numel()) % 251)
        made.append(side)
        return side

    yield make
    for side in made:
        side.close()


@pytest.fixture
def side(make_side: Callable[..., Any]) -> Any:
    return make_side()


@pytest.fixture
def own(make_side: Callable[..., Any]) -> Any:
    """A side whose transfers may be refused."""
    return make_side(own_engine=True)


def block(side: Any, peer: Any, src_page: int, dst_page: int, pages: int = 1) -> tuple[int, int, int]:
    src = side.bound.arena.base + src_page * PAGE
    return src, peer.told["base"] + dst_page * PAGE, pages * PAGE


def aux_block(side: Any, peer: Any, item: int = 0) -> tuple[int, int, int]:
    offset = item * AUX_ITEM
    return side.aux.data_ptr() + offset, peer.told["aux"] + offset, AUX_ITEM


def page_of(side: Any, page: int, pages: int = 1) -> bytes:
    return bytes(side.bytes[page * PAGE : (page + pages) * PAGE].numpy())


def there(peer: Any, page: int, pages: int = 1) -> bytes:
    return bytes(peer.ask("read", page * PAGE, pages * PAGE))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_both_processes_are_hooked_and_export_what_is_backed(side: Any, peer: Any, sglang: Any) -> None:
    told = peer.told
    # The peer was attached by SGLang's load_plugins and the environment alone.
    assert set(told["hooked"]) == {target.path for target in same_host.hook_targets()}
    assert dict(told["registered"]) == {"mooncake": told["backed"], "same-host": told["backed"]}
    arena = side.bound.arena
    assert {ledger.engine.name: ledger.regions for ledger in side.bound.ledgers} == {
        "mooncake": (Region(arena.base, arena.backed_bytes),),
        "same-host": (Region(arena.base, arena.backed_bytes),),
    }


def test_one_batch_is_split_by_address(side: Any, peer: Any) -> None:
    """Pages of the arena through mapped memory, the aux buffer by Mooncake, in one call of SGLang's."""
    blocks = [block(side, peer, 10, 20, 3), aux_block(side, peer, 2), block(side, peer, 40, 7)]
    assert side.manager._transfer_data(peer.told["session"], blocks) == 0
    assert there(peer, 20, 3) == page_of(side, 10, 3)
    assert there(peer, 7) == page_of(side, 40)
    assert peer.ask("read_aux", 2 * AUX_ITEM, AUX_ITEM) == bytes(range(2 * AUX_ITEM, 3 * AUX_ITEM))
    assert side.spy.batches == [(peer.told["session"], *([value] for value in blocks[1]))]
    assert side.path.ledger.traffic.nbytes == 4 * PAGE
    mooncake = next(ledger for ledger in side.bound.ledgers if ledger.engine.name == "mooncake")
    assert (mooncake.traffic.nbytes, mooncake.traffic.failures) == (AUX_ITEM, 0)
    # Nothing else was written.
    assert there(peer, 0, 7) == bytes(7 * PAGE)


def test_the_managers_own_page_lists(side: Any, peer: Any) -> None:
    """SGLang's code from page ids to blocks, and from a request to its aux item."""
    if side.rig.release.number < 20:
        pytest.skip("its page lists know no unified pool: PD with unified memory came with 0.5.20")
    src = np.array([3, 4, 5, 90, 17, 300], np.int32)
    dst = np.array([60, 61, 62, 11, 12, 400], np.int32)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        code = side.manager._send_kvcache_generic(
            mooncake_session_id=peer.told["session"],
            src_data_ptrs=side.manager.kv_args.kv_data_ptrs,
            dst_data_ptrs=[peer.told["base"]],
            item_lens=[PAGE],
            prefill_data_indices=src,
            dst_data_indices=dst,
            executor=executor,
            src_layer_ids=[0],
            dst_layer_ids=[0],
        )
    assert code == 0
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        assert there(peer, b) == page_of(side, a)
    assert side.spy.batches == []
    request = SimpleNamespace(mooncake_session_id=peer.told["session"], dst_aux_index=5)
    assert side.manager.send_aux(request, 1, [peer.told["aux"]]) == 0
    assert peer.ask("read_aux", 5 * AUX_ITEM, AUX_ITEM) == bytes(range(AUX_ITEM, 2 * AUX_ITEM))
    assert side.spy.nbytes == AUX_ITEM


def test_a_single_transfer_goes_the_same_way(side: Any, peer: Any) -> None:
    assert side.engine.transfer_sync(peer.told["session"], *block(side, peer, 1, 2)) == 0
    assert there(peer, 2) == page_of(side, 1)
    assert side.engine.transfer_sync(peer.told["session"], *aux_block(side, peer)) == 0
    assert side.spy.nbytes == AUX_ITEM


def test_blocks_past_a_region_are_mooncakes_to_judge(own: Any, peer: Any, caplog: Any) -> None:
    end = peer.told["base"] + peer.told["backed"]
    over = [(own.bound.arena.base, end - PAGE, 2 * PAGE)]
    assert own.manager._transfer_data(peer.told["session"], over) != 0
    assert own.spy.nbytes == 2 * PAGE
    assert warnings_in(caplog) == []
    assert own.manager._transfer_data(peer.told["session"], [block(own, peer, 0, 1)]) == 0


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
    assert own.engine.batch_transfer_sync(session, *map(list, zip(block(own, peer, 0, 1)))) == 0


def test_many_threads_at_once_attach_once(make_side: Any, peer: Any, caplog: Any) -> None:
    side = make_side()
    order = np.random.default_rng(5).permutation(512)
    codes: list[int] = []

    def send(worker: int) -> None:
        for page in order[worker::8]:
            blocks = [block(side, peer, int(page), int(page)), aux_block(side, peer, worker)]
            codes.append(side.manager._transfer_data(peer.told["session"], blocks))

    with caplog.at_level(logging.INFO, "kvarena.sglang"):
        threads = [threading.Thread(target=send, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert codes == [0] * 512
    assert there(peer, 0, 512) == page_of(side, 0, 512)
    assert sum("written through mapped memory" in r.getMessage() for r in caplog.records) == 1
    assert side.path.ledger.traffic.nbytes == 512 * PAGE
    assert side.spy.nbytes == 512 * AUX_ITEM


def test_a_session_elsewhere_is_mooncakes_whatever_lies_in_the_directory(
    side: Any, peer: Any, directory: Path
) -> None:
    session = "192.0.2.77:15000"
    real = msgspec.json.decode(path_of(directory, peer.told["session"]).read_bytes(), type=Card)
    msgspec.structs.replace(real, session=session).write(directory)
    side.engine.engine = SimpleNamespace(batch_transfer_sync_write=lambda *given: given[0] == session and 0)
    assert side.manager._transfer_data(session, [block(side, peer, 0, 1)]) == 0
    side.engine.engine = side.spy
    assert there(peer, 1) == bytes(PAGE)
    assert side.path.ledger.traffic.transfers == 0
    path_of(directory, session).unlink()


def test_a_peer_without_kvarena_is_mooncakes_without_a_word(
    side: Any, sides: Any, peer: Any, caplog: Any
) -> None:
    plain = resolve(sides.WRAPPER)("127.0.0.1")
    target = torch.zeros(PAGE, dtype=torch.uint8)
    assert plain.engine.register_memory(target.data_ptr(), PAGE) == 0
    src = block(side, peer, 9, 0)[0]
    assert side.manager._transfer_data(plain.get_session_id(), [(src, target.data_ptr(), PAGE)]) == 0
    assert bytes(target.numpy()) == page_of(side, 9)
    assert side.spy.nbytes == PAGE
    assert warnings_in(caplog) == []
    assert plain.engine.unregister_memory(target.data_ptr()) == 0


def test_a_peer_that_steps_down_and_up_is_attached_anew(own: Any, peer: Any, caplog: Any) -> None:
    session = peer.told["session"]
    assert own.manager._transfer_data(session, [block(own, peer, 0, 1)]) == 0
    peer.ask("step_down")
    # Neither way leads there now.
    assert own.manager._transfer_data(session, [block(own, peer, 0, 2)]) != 0
    peer.ask("step_up")
    # A refused transfer costs Mooncake a lane: wait for the aux item alone.
    assert any(own.manager._transfer_data(session, [aux_block(own, peer)]) == 0 for _ in range(3))
    before = own.path.ledger.traffic.nbytes
    assert own.manager._transfer_data(session, [block(own, peer, 5, 3)]) == 0
    assert there(peer, 3) == page_of(own, 5)
    assert own.path.ledger.traffic.nbytes == before + PAGE
    assert warnings_in(caplog) == []


def test_memory_that_cannot_be_imported_goes_by_mooncake_with_one_warning(
    rig: Any, make_side: Any, peer: Any, caplog: Any
) -> None:
    driver = FailingDriver(HostVmm(), fail_at=1, ops={"import_fd"}, forever=True)
    rig.use_driver(driver)
    side, session = make_side(), peer.told["session"]
    for page in range(3):
        assert side.manager._transfer_data(session, [block(side, peer, page, page + 1)]) == 0
        assert there(peer, page + 1) == page_of(side, page)
    assert side.spy.nbytes == 3 * PAGE
    (warned,) = warnings_in(caplog)
    assert session in warned
    assert "cannot be mapped" in warned
    assert driver.calls.count("import_fd") == 1  # a peer that is marked slow is not tried again
    driver.fail_at = None
    peer.ask("step_down")
    peer.ask("step_up")
    assert side.manager._transfer_data(session, [block(side, peer, 8, 9)]) == 0
    assert there(peer, 9) == page_of(side, 8)
    assert side.spy.nbytes == 3 * PAGE
    assert len(warnings_in(caplog)) == 1


def test_a_socket_that_is_gone_means_one_warning_and_mooncake(side: Any, peer: Any, caplog: Any) -> None:
    peer.ask("lose_socket")
    for page in range(2):
        assert side.manager._transfer_data(peer.told["session"], [block(side, peer, page, 30 + page)]) == 0
    assert there(peer, 30, 2) == page_of(side, 0, 2)
    assert side.spy.nbytes == 2 * PAGE
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
    side.path._routes.clear()
    blocks = [block(side, peer, 2, 3), aux_block(side, peer), block(side, peer, 4, 5)]
    assert side.manager._transfer_data(session, blocks) == 0
    assert there(peer, 3) == page_of(side, 2)
    assert there(peer, 5) == page_of(side, 4)
    # The rest first, then what the fast path did not do: no byte twice.
    assert [lengths for *_, lengths in side.spy.batches] == [[AUX_ITEM], [PAGE, PAGE]]
    assert len(faulty.disconnected) == 1
    assert side.path.ledger.traffic.failures == 1
    for _ in range(3):
        assert side.manager._transfer_data(session, [block(side, peer, 6, 7)]) == 0
    assert len(faulty.disconnected) == 1
    assert len(warnings_in(caplog)) == 1


def test_a_copy_that_never_ends_is_a_failure_and_not_written_twice(
    make_side: Any, peer: Any, caplog: Any
) -> None:
    """Mooncake must not write what a copy may still write: the pages could be another request's by then."""
    side = make_side()
    side.path._engine = Faulty(side.path._engine, ends=TransferTimeout("same-host", "p", 30.0))
    side.path._routes.clear()
    assert side.manager._transfer_data(peer.told["session"], [block(side, peer, 2, 3)]) == -1
    assert side.spy.batches == []
    assert "may hang" in warnings_in(caplog)[-1]


def test_mooncakes_own_failure_is_the_answer_and_the_copy_has_ended(own: Any, peer: Any, caplog: Any) -> None:
    blocks = [block(own, peer, 2, 3), (own.aux.data_ptr(), peer.told["aux"] + (1 << 20), AUX_ITEM)]
    assert own.manager._transfer_data(peer.told["session"], blocks) < 0
    assert own.path.ledger.traffic.nbytes == PAGE
    assert there(peer, 3) == page_of(own, 2)
    assert warnings_in(caplog) == []


def test_registered_before_finalize_is_exported_again_after(
    make_side: Any, directory: Path, peer: Any
) -> None:
    side = make_side(finalize=False)
    sink = side.bound.arena.backed_bytes
    assert side.path.ledger.registered_bytes == sink
    side.finalize()
    backed = side.bound.arena.backed_bytes
    assert side.path.ledger.registered_bytes == backed > sink
    card = msgspec.json.decode(path_of(directory, side.session).read_bytes(), type=Card)
    assert card.regions == [(side.bound.arena.base, backed)]


def test_a_path_that_goes_takes_everything_along(side: Any, directory: Path, peer: Any) -> None:
    side.step_down()
    with no_leaks():
        side.step_up()
        socket_path, card = side.path.socket_path, path_of(directory, side.session)
        assert socket_path.is_socket()
        assert card.stat().st_mode & 0o777 == 0o600
        assert side.manager._transfer_data(peer.told["session"], [block(side, peer, 0, 1)]) == 0
        side.step_down()
        assert not socket_path.exists()
        assert not card.exists()
        assert side.bound.ledgers == []


def test_a_pool_that_closes_takes_the_path_along(side: Any, directory: Path) -> None:
    socket_path, card = side.path.socket_path, path_of(directory, side.session)
    side.bound.close()
    assert not socket_path.exists()
    assert not card.exists()
    assert side.bound.ledgers == []


def test_off_means_nothing_is_there(
    rig: Any, sides: Any, shared_engine: Any, peer: Any, directory: Path
) -> None:
    before = sorted(directory.iterdir())
    side = sides.Side(rig, engine=shared_engine)
    assert side.path is None
    assert sorted(directory.iterdir()) == before
    assert [ledger.engine.name for ledger in side.bound.ledgers] == ["mooncake"]
    assert side.manager._transfer_data(peer.told["session"], [block(side, peer, 0, 1)]) == 0
    side.close()


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


def test_another_shape_is_one_clear_line(
    sglang: Any, sides: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(resolve(sides.WRAPPER), "transfer_sync", lambda self, session_id, blocks: 0)
    registry = SimpleNamespace(_hooks={}, register=None)
    same_host.register_hooks(registry, None)
    (warned,) = warnings_in(caplog)
    assert "no effect" in warned
    assert "transfer_sync" in warned


class Event:
    """A CUDA event that comes when a test says so."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def synchronize(self) -> None:
        assert self.come.wait(30)


def test_a_cached_prefix_is_not_read_before_it_is_written(side: Any, peer: Any, sglang: Any) -> None:
    """SGLang sends it while the step before may still write it, and records an event for that.

    Since 0.5.22 its own transfer worker waits for the event; before, only MoRI's did.
    """
    request = resolve("sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.add_transfer_request")
    waits_itself = "wait_event" in inspect.signature(request).parameters
    assert waits_itself == (sglang.number >= 22)
    assert (same_host.EARLY_SEND in same_host.hook_targets()) != waits_itself
    if waits_itself:
        return
    event, answers = Event(), []
    sender = SimpleNamespace(kv_mgr=side.manager, _early_send_wait_event=event)
    same_host.send(lambda self, pages: answers.append(pages), sender, "pages")
    assert answers == ["pages"]
    assert sender._early_send_wait_event is None
    blocks = [block(side, peer, 0, 1), aux_block(side, peer)]
    thread = threading.Thread(
        target=lambda: answers.append(side.manager._transfer_data(peer.told["session"], blocks))
    )
    thread.start()
    time.sleep(0.05)
    assert there(peer, 1) == bytes(PAGE)
    assert side.spy.batches == []
    event.come.set()
    thread.join(30)
    assert answers == ["pages", 0]
    assert there(peer, 1) == page_of(side, 0)
    assert side.manager._transfer_data(peer.told["session"], blocks) == 0


def test_the_peers_death_ends_in_a_code_not_in_a_hang(
    own: Any, peer: Any, directory: Path, caplog: Any
) -> None:
    """The last of the tests, as the next one would need a new peer."""
    session = peer.told["session"]
    assert own.manager._transfer_data(session, [block(own, peer, 0, 1)]) == 0
    peer.kill()
    assert path_of(directory, session).exists()
    began = time.monotonic()
    codes = [own.manager._transfer_data(session, [block(own, peer, 0, 1)]) for _ in range(2)]
    assert all(code < 0 for code in codes)
    assert time.monotonic() - began < 60
    assert len(warnings_in(caplog)) == 1
