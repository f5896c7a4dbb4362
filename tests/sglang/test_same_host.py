"""KVARENA_SAME_HOST: SGLang's own calls, real Mooncake TCP, two processes; who carried what is counted."""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.same_host import engine_hooks as same_host
from kvarena.plugin.engines.sglang.same_host.card import Card, path_of
from kvarena.pool.testing import no_leaks
from kvarena.transfer import Region

pytestmark = pytest.mark.sglang

PAGE, AUX_ITEM = 512, 64


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
    blocks = [side.block(peer, 10, 20, 3), side.aux_block(peer, 2), side.block(peer, 40, 7)]
    assert side.manager._transfer_data(peer.told["session"], blocks) == 0
    assert peer.page(20, 3) == side.page(10, 3)
    assert peer.page(7) == side.page(40)
    assert peer.ask("read_aux", 2 * AUX_ITEM, AUX_ITEM) == bytes(range(2 * AUX_ITEM, 3 * AUX_ITEM))
    assert side.mooncake.batches == [(peer.told["session"], *([value] for value in blocks[1]))]
    assert side.path.ledger.traffic.nbytes == 4 * PAGE
    mooncake = next(ledger for ledger in side.bound.ledgers if ledger.engine.name == "mooncake")
    assert (mooncake.traffic.nbytes, mooncake.traffic.failures) == (AUX_ITEM, 0)
    # Nothing else was written.
    assert peer.page(0, 7) == bytes(7 * PAGE)


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
        assert peer.page(b) == side.page(a)
    assert side.mooncake.batches == []
    request = SimpleNamespace(mooncake_session_id=peer.told["session"], dst_aux_index=5)
    assert side.manager.send_aux(request, 1, [peer.told["aux"]]) == 0
    assert peer.ask("read_aux", 5 * AUX_ITEM, AUX_ITEM) == bytes(range(AUX_ITEM, 2 * AUX_ITEM))
    assert side.mooncake.nbytes == AUX_ITEM


def test_a_single_transfer_goes_the_same_way(side: Any, peer: Any) -> None:
    assert side.engine.transfer_sync(peer.told["session"], *side.block(peer, 1, 2)) == 0
    assert peer.page(2) == side.page(1)
    assert side.engine.transfer_sync(peer.told["session"], *side.aux_block(peer)) == 0
    assert side.mooncake.nbytes == AUX_ITEM


def test_many_threads_at_once_attach_once(make_side: Any, peer: Any, caplog: Any) -> None:
    side = make_side()
    order = np.random.default_rng(5).permutation(512)
    codes: list[int] = []

    def send(worker: int) -> None:
        for page in order[worker::8]:
            blocks = [side.block(peer, int(page), int(page)), side.aux_block(peer, worker)]
            codes.append(side.manager._transfer_data(peer.told["session"], blocks))

    with caplog.at_level(logging.INFO, "kvarena.sglang"):
        threads = [threading.Thread(target=send, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert codes == [0] * 512
    assert peer.page(0, 512) == side.page(0, 512)
    assert sum("written through mapped memory" in r.getMessage() for r in caplog.records) == 1
    assert side.path.ledger.traffic.nbytes == 512 * PAGE
    assert side.mooncake.nbytes == 512 * AUX_ITEM


def test_a_session_elsewhere_is_mooncakes_whatever_lies_in_the_directory(
    side: Any, peer: Any, sockets: Path
) -> None:
    session = "192.0.2.77:15000"
    real = msgspec.json.decode(path_of(sockets, peer.told["session"]).read_bytes(), type=Card)
    msgspec.structs.replace(real, session=session).write(sockets)
    side.engine.engine = SimpleNamespace(batch_transfer_sync_write=lambda *given: given[0] == session and 0)
    assert side.manager._transfer_data(session, [side.block(peer, 0, 1)]) == 0
    side.engine.engine = side.mooncake
    assert peer.page(1) == bytes(PAGE)
    assert side.path.ledger.traffic.transfers == 0
    path_of(sockets, session).unlink()


def test_a_peer_without_kvarena_is_mooncakes_without_a_word(
    side: Any, sides: Any, peer: Any, caplog: Any
) -> None:
    plain = resolve(sides.WRAPPER)("127.0.0.1")
    target = torch.zeros(PAGE, dtype=torch.uint8)
    assert plain.engine.register_memory(target.data_ptr(), PAGE) == 0
    src = side.block(peer, 9, 0)[0]
    assert side.manager._transfer_data(plain.get_session_id(), [(src, target.data_ptr(), PAGE)]) == 0
    assert bytes(target.numpy()) == side.page(9)
    assert side.mooncake.nbytes == PAGE
    assert warnings_in(caplog) == []
    assert plain.engine.unregister_memory(target.data_ptr()) == 0


def test_registered_before_finalize_is_exported_again_after(make_side: Any, sockets: Path, peer: Any) -> None:
    side = make_side(finalize=False)
    sink = side.bound.arena.backed_bytes
    assert side.path.ledger.registered_bytes == sink
    side.finalize()
    backed = side.bound.arena.backed_bytes
    assert side.path.ledger.registered_bytes == backed > sink
    card = msgspec.json.decode(path_of(sockets, side.session).read_bytes(), type=Card)
    assert card.regions == [(side.bound.arena.base, backed)]


def test_a_path_that_goes_takes_everything_along(side: Any, sockets: Path, peer: Any) -> None:
    side.step_down()
    with no_leaks():
        side.step_up()
        socket_path, card = side.path.socket_path, path_of(sockets, side.session)
        assert socket_path.is_socket()
        assert card.stat().st_mode & 0o777 == 0o600
        assert side.manager._transfer_data(peer.told["session"], [side.block(peer, 0, 1)]) == 0
        side.step_down()
        assert not socket_path.exists()
        assert not card.exists()
        assert side.bound.ledgers == ()


def test_a_pool_that_closes_takes_the_path_along(side: Any, sockets: Path) -> None:
    socket_path, card = side.path.socket_path, path_of(sockets, side.session)
    side.bound.close()
    assert not socket_path.exists()
    assert not card.exists()
    assert side.bound.ledgers == ()


def test_off_means_nothing_is_there(
    rig: Any, sides: Any, shared_engine: Any, peer: Any, sockets: Path
) -> None:
    before = sorted(sockets.iterdir())
    side = sides.Side(rig, engine=shared_engine)
    assert side.path is None
    assert sorted(sockets.iterdir()) == before
    assert [ledger.engine.name for ledger in side.bound.ledgers] == ["mooncake"]
    assert side.manager._transfer_data(peer.told["session"], [side.block(peer, 0, 1)]) == 0
    side.close()


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
    blocks = [side.block(peer, 0, 1), side.aux_block(peer)]
    thread = threading.Thread(
        target=lambda: answers.append(side.manager._transfer_data(peer.told["session"], blocks))
    )
    thread.start()
    time.sleep(0.05)
    assert peer.page(1) == bytes(PAGE)
    assert side.mooncake.batches == []
    event.come.set()
    thread.join(30)
    assert answers == ["pages", 0]
    assert peer.page(1) == side.page(0)
    assert side.manager._transfer_data(peer.told["session"], blocks) == 0
