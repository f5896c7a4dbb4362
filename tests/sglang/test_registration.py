"""KV managers, linkers and the ledger: only what is backed, each byte once, no failure unnoticed."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from kvarena.errors import KvArenaError
from kvarena.hooks import hookimpl
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.pool.errors import PoolStateError
from kvarena.transfer import QuiesceTimeout, RegistrationError

pytestmark = pytest.mark.sglang

WRAPPER = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine"


class Mooncake:
    """Mooncake's registration calls with its rules (overlaps are -7, unknown addresses -3), written down."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.fail: int | None = None

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, address: int, nbytes: int, location: str = "*") -> int:
        self.calls.append(("register", address, nbytes))
        if self.fail is not None and len(self.held) == self.fail:
            return -1
        if any(address < a + n and a < address + nbytes for a, n in self.held.items()):
            return -7
        self.held[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        return 0 if self.held.pop(address, None) is not None else -3

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        self.calls.append(("batch", len(addresses), 0))
        return max((self.register_memory(a, n) for a, n in zip(addresses, lengths, strict=True)), default=0)

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        self.calls.append(("batch", len(addresses), 1))
        return min((self.unregister_memory(a) for a in addresses), default=0)


class Nixl:
    """A NIXL agent's registration calls, written down."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int, str]] = []
        self.refuse = ""

    def register_memory(self, descriptors: list[tuple[int, int, int, str]], memory: str) -> Any:
        if self.refuse == "empty":
            return None
        if self.refuse == "raise":
            raise RuntimeError("NIXL_ERR_BACKEND")
        (descriptor,) = descriptors
        self.held.append((descriptor[0], descriptor[1], memory))
        return [self.held[-1]]

    def deregister_memory(self, descriptors: Any) -> None:
        for each in descriptors:
            self.held.remove(each)


@pytest.fixture
def manager(rig: Any) -> Any:
    """A real KV manager of the release, as far as registration goes."""

    def build(bundle: Any, *, backend: str = "mooncake", overlap: bool = False) -> Any:
        infos = bundle.kv.full_kv_pool, bundle.kv.swa_kv_pool
        if rig.release.number < 20:  # its pools cannot be asked: PD with unified memory came later
            base, nbytes = bundle.pool._raw.data_ptr(), bundle.pool._raw.numel()
            kv, state = ([base], [nbytes], [64]), ([base], [nbytes], [96])
        else:
            kv, state = (part.get_contiguous_buf_infos() for part in infos)
        aux = torch.zeros(4096, dtype=torch.uint8)
        aux_ptrs, aux_lens = [aux.data_ptr()], [4096]
        if overlap:
            aux_ptrs, aux_lens = [aux.data_ptr(), aux.data_ptr() + 1024], [2048, 3072]
        args = SimpleNamespace(
            kv_data_ptrs=list(kv[0]), kv_data_lens=list(kv[1]), kv_item_lens=list(kv[2]),
            kv_data_mem_kinds=["VRAM"],
            aux_data_ptrs=aux_ptrs, aux_data_lens=aux_lens, aux_item_lens=[64],
            # A state component without a buffer keeps its place, as stock's do.
            state_data_ptrs=[list(state[0]), [0]], state_data_lens=[list(state[1]), [0]],
            gpu_id=0, aux=aux,
        )  # fmt: skip
        name = {"mooncake": "mooncake.conn.MooncakeKVManager", "nixl": "nixl.conn.NixlKVManager"}[backend]
        made = object.__new__(resolve(f"sglang.srt.disaggregation.{name}"))
        made.kv_args = args
        made.engine = object.__new__(resolve(WRAPPER))
        made.engine.hostname, made.engine.engine = "127.0.0.1", Mooncake()
        made.agent = Nixl()
        made.connection_pool, made.connection_lock = {"peer": 1}, threading.Lock()
        return made

    return build


@pytest.fixture
def finalized(rig: Any) -> Any:
    bundle = rig.reserved(256, 128)
    bundle.resize(rig.config(164, 84))
    return bundle


def test_what_is_registered_is_what_is_backed(finalized: Any, manager: Any) -> None:
    kv = manager(finalized)
    kv.register_buffer_to_engine()
    arena, engine = finalized.bound.arena, kv.engine.engine
    assert engine.held == {arena.base: arena.backed_bytes, kv.kv_args.aux_data_ptrs[0]: 4096}
    (ledger,) = finalized.bound.ledgers
    assert ledger.registered_bytes == arena.backed_bytes
    assert kv.kv_args.kv_data_lens == [finalized.bound.total_bytes]
    assert kv.kv_args.state_data_lens[0] == [finalized.bound.total_bytes]
    assert not any(call[0] == "batch" for call in engine.calls)


def test_the_log_says_how_long_each_step_took(finalized: Any, manager: Any) -> None:
    # The lines said ms=0.000 for what nobody had timed.
    manager(finalized).register_buffer_to_engine()
    took = {event.name: event.milliseconds for event in finalized.bound.observer.timeline.events}
    assert set(took) == {"reserved", "sink", "registered"}
    assert all(milliseconds > 0 for milliseconds in took.values()), took


def test_the_status_file_says_registered_and_backed(
    rig: Any, manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the GPU driver, and ``kvarena status``, read."""
    told = msgspec.structs.replace(runtime.settings, status=True, socket_dir=str(tmp_path / "status"))
    monkeypatch.setattr(runtime, "settings", told)
    bundle = rig.reserved(256, 128)
    bundle.resize(rig.config(164, 84))
    manager(bundle).register_buffer_to_engine()
    report = bundle.bound.observer
    assert report is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files = list((tmp_path / "status").glob("*.status.json"))
        pool = json.loads(files[0].read_text())["pool"] if files else {}
        if pool.get("engines"):
            break
        time.sleep(0.05)
    assert pool["state"] == "serving"
    (engine,) = pool["engines"]
    assert engine["registered_bytes"] == pool["backed_bytes"] == bundle.bound.arena.backed_bytes
    assert pool["active_bytes"] == bundle.bound.total_bytes
    assert len(pool["handle_bytes"]) == 1
    assert {each["name"] for each in pool["sub_pools"]} == {"full", "swa"}
    locations = bundle.allocator.alloc(8)
    live = {each.name: each.live_pages for each in report.reporter.pool_status().sub_pools}
    assert live == {"full": 2, "swa": 2}
    bundle.allocator.free(locations)
    bundle.bound.close()
    assert not list((tmp_path / "status").glob("*.status.json"))


def test_overlapping_aux_buffers_are_registered_once(finalized: Any, manager: Any) -> None:
    kv = manager(finalized, overlap=True)
    kv.register_buffer_to_engine()
    assert kv.engine.engine.held[kv.kv_args.aux_data_ptrs[0]] == 4096


@pytest.mark.parametrize("at", [0, 1])
def test_a_refused_registration_is_raised_with_engine_address_length_and_code(
    finalized: Any, manager: Any, at: int
) -> None:
    """Stock logs at DEBUG and goes on; the first transfer would fail."""
    kv = manager(finalized)
    kv.engine.engine.fail = at
    with pytest.raises(RegistrationError) as caught:
        kv.register_buffer_to_engine()
    assert caught.value.engine == "mooncake"
    assert caught.value.code == -1
    assert caught.value.region.address in (finalized.bound.arena.base, kv.kv_args.aux_data_ptrs[0])
    assert caught.value.region.nbytes in (finalized.bound.arena.backed_bytes, 4096)
    assert kv.engine.engine.held == {}
    assert finalized.bound.ledgers == ()


def test_role_switch_unregisters_exactly_what_was_registered(finalized: Any, manager: Any) -> None:
    kv = manager(finalized)
    engine = kv.engine.engine
    kv.register_buffer_to_engine()
    held = dict(engine.held)
    kv.kv_args.kv_data_lens[0] += 1  # what stock would compute again by now
    kv.deregister_buffer_to_engine()
    assert engine.held == {}
    assert [call[1] for call in engine.calls if call[0] == "unregister"] == sorted(
        held, key=[call[1] for call in engine.calls if call[0] == "unregister"].index
    )
    assert kv.connection_pool == {}  # what stock does beside
    assert finalized.bound.ledgers == ()
    kv.deregister_buffer_to_engine()
    again = manager(finalized)
    again.engine = kv.engine
    again.register_buffer_to_engine()
    assert engine.held[finalized.bound.arena.base] == finalized.bound.arena.backed_bytes


@pytest.fixture
def switched(rig: Any, manager: Any) -> Any:
    """A manager that SGLang can tear down as it does in a role switch."""
    if rig.release.number < 21:
        pytest.skip("roles can be switched since 0.5.21")

    def build(bundle: Any) -> Any:
        made = manager(bundle)
        made._worker_threads, made._socket_cache, made._monitor_cache = [], {}, {}
        made._socket_lock = threading.Lock()
        made.server_socket = SimpleNamespace(close=lambda linger: None)
        made._zmq_ctx = SimpleNamespace(destroy=lambda linger: None)
        made.disaggregation_mode = SimpleNamespace(value="prefill")
        return made

    return build


def test_sglangs_teardown_and_the_next_managers_registration(finalized: Any, switched: Any) -> None:
    first, second = switched(finalized), switched(finalized)
    second.engine = first.engine  # one a process
    engine, arena = first.engine.engine, finalized.bound.arena
    first.register_buffer_to_engine()
    first.teardown()
    assert engine.held == {}
    second.register_buffer_to_engine()
    assert engine.held == {arena.base: arena.backed_bytes, second.kv_args.aux_data_ptrs[0]: 4096}


def test_what_a_teardown_could_not_unregister_is_an_error_of_the_next_manager(
    finalized: Any, switched: Any
) -> None:
    """SGLang logs what fails in a teardown, and goes on."""
    first, second = switched(finalized), switched(finalized)
    second.engine = first.engine
    engine, arena = first.engine.engine, finalized.bound.arena
    first.register_buffer_to_engine()
    engine.unregister_memory, unregister = (lambda address: -202), engine.unregister_memory
    first.teardown()
    with pytest.raises(RegistrationError, match="-7"):
        second.register_buffer_to_engine()
    assert engine.held[arena.base] == arena.backed_bytes
    engine.unregister_memory = unregister


def test_a_manager_that_registered_first_is_registered_again_after_finalize(rig: Any, manager: Any) -> None:
    bundle = rig.reserved(256, 128)
    kv = manager(bundle)
    kv.register_buffer_to_engine()
    arena, engine = bundle.bound.arena, kv.engine.engine
    sink = arena.backed_bytes
    assert engine.held[arena.base] == sink
    assert kv.kv_args.kv_data_lens == [bundle.bound.sink_bytes]
    bundle.resize(rig.config(164, 84))
    assert engine.held[arena.base] == arena.backed_bytes > sink
    assert kv.kv_args.kv_data_lens == [bundle.bound.total_bytes]
    order = [call for call in engine.calls if call[1] == arena.base]
    assert [call[0] for call in order] == ["register", "unregister", "register"]


def test_a_failed_registration_after_finalize_undoes_finalize(rig: Any, manager: Any) -> None:
    bundle = rig.reserved(256, 128)
    kv = manager(bundle)
    kv.register_buffer_to_engine()
    engine, arena = kv.engine.engine, bundle.bound.arena
    sink = arena.backed_bytes
    register = engine.register_memory
    engine.register_memory = lambda address, nbytes, *where: (
        -1 if nbytes > sink else register(address, nbytes)
    )
    with pytest.raises(RegistrationError):
        bundle.kv.finalize_backing(rig.config(164, 84))
    assert bundle.bound.active_allocation_bytes == bundle.bound.sink_bytes
    assert arena.backed_bytes == sink
    assert engine.held[arena.base] == sink


def test_who_will_not_let_go_keeps_nobody_else_from_it(
    rig: Any, manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A finalize that is taken back, while one engine holds on to the new memory."""
    bundle = rig.reserved(256, 128)
    first, second = manager(bundle), manager(bundle)
    for kv in (first, second):
        kv.register_buffer_to_engine()
    arena = bundle.bound.arena

    class Broken:
        @hookimpl(trylast=True)
        def kvarena_pool_finalized(self, pool: Any) -> None:
            for kv in (first, second):
                assert kv.engine.engine.held[arena.base] > bundle.bound.sink_bytes
            stuck.unregister_memory = lambda address: -202
            raise ZeroDivisionError("an observer of anybody's")

    stuck, other = first.engine.engine, second.engine.engine
    rig.plug(Broken())
    with pytest.raises(KvArenaError, match="an observer of anybody's"):
        bundle.kv.finalize_backing(rig.config(164, 84))
    assert arena.base in stuck.held
    assert "still holds registrations" in caplog.text
    # The sink, the new size, and what is there now.
    done = [call[0] for call in other.calls if call[1] == arena.base]
    assert done == ["register", "unregister", "register", "unregister", "register"]
    del stuck.unregister_memory


def test_memory_stays_while_an_engine_will_not_let_go(finalized: Any, manager: Any) -> None:
    kv = manager(finalized)
    kv.register_buffer_to_engine()
    engine = kv.engine.engine
    engine.unregister_memory, unregister = (lambda address: -202), engine.unregister_memory
    with pytest.raises(PoolStateError, match="mooncake still holds"):
        finalized.bound.revert_finalize()
    assert finalized.bound.finalized
    engine.unregister_memory = unregister


@pytest.mark.parametrize("refused", ["arena", "aux"])
def test_what_an_engine_will_not_let_go_holds_nothing_else(
    finalized: Any, manager: Any, refused: str
) -> None:
    kv = manager(finalized)
    kv.register_buffer_to_engine()
    engine, unregister = kv.engine.engine, kv.engine.engine.unregister_memory
    stuck = finalized.bound.arena.base if refused == "arena" else kv.kv_args.aux_data_ptrs[0]
    engine.unregister_memory = lambda address: -202 if address == stuck else unregister(address)
    with pytest.raises(RegistrationError, match="-202"):
        kv.deregister_buffer_to_engine()
    assert list(engine.held) == [stuck]
    engine.unregister_memory = unregister
    finalized.bound.close()
    assert engine.held == {}


def test_a_same_host_path_that_will_not_end_does_not_hold_mooncakes_registrations(
    finalized: Any, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(manager: Any) -> None:
        raise QuiesceTimeout("Copies did not end", in_flight=1, seconds=30.0)

    kv = manager(finalized)
    kv.register_buffer_to_engine()
    monkeypatch.setattr("kvarena.plugin.engines.sglang.same_host.engine_hooks.step_aside", busy)
    with pytest.raises(QuiesceTimeout):
        kv.deregister_buffer_to_engine()
    assert kv.engine.engine.held == {}


@pytest.fixture
def staged(rig: Any, finalized: Any, manager: Any) -> Any:
    """A manager that has registered, and the buffer that it will stage pages in."""
    if rig.release.number < 19:
        pytest.skip("staging buffers are registered in a method since 0.5.19")
    kv = manager(finalized)
    kv.staging = torch.zeros(8192, dtype=torch.uint8)
    kv.register_buffer_to_engine()
    return kv


def test_staging_buffers_go_with_the_others_and_come_back_with_them(staged: Any) -> None:
    """Stock never takes them back: a role switch leaves their addresses with the engine."""
    engine, ptr = staged.engine.engine, staged.staging.data_ptr()
    before = dict(engine.held)
    staged._register_staging_memory(ptr, 8192)
    assert engine.held == before | {ptr: 8192}
    assert not any(call[0] == "batch" for call in engine.calls)
    staged.deregister_buffer_to_engine()
    assert engine.held == {}
    staged.register_buffer_to_engine()
    assert engine.held == before | {ptr: 8192}


def test_a_refused_staging_buffer_is_raised(staged: Any) -> None:
    held = dict(staged.engine.engine.held)
    staged.engine.engine.fail = len(held)
    with pytest.raises(RegistrationError) as caught:
        staged._register_staging_memory(staged.staging.data_ptr(), 8192)
    assert (caught.value.code, caught.value.region.nbytes) == (-1, 8192)
    assert staged.engine.engine.held == held


def test_close_unregisters_before_the_memory_goes(finalized: Any, manager: Any) -> None:
    kv = manager(finalized)
    kv.register_buffer_to_engine()
    finalized.bound.close()
    assert kv.engine.engine.held == {}


def test_memory_under_a_registration_that_stays_is_not_unmapped_by_close(
    finalized: Any, manager: Any
) -> None:
    """It was, in silence; what a plugin raised at the end was dropped."""
    kv = manager(finalized)
    kv.register_buffer_to_engine()
    engine, bound = kv.engine.engine, finalized.bound
    engine.unregister_memory, unregister = (lambda address: -202), engine.unregister_memory
    with pytest.raises(RegistrationError, match="-202"):
        bound.close()
    assert not bound.closed
    assert bound.arena.backed_bytes == engine.held[bound.arena.base]
    assert bound in runtime.pools
    engine.unregister_memory = unregister
    bound.close()
    assert bound.closed
    assert engine.held == {}


def test_what_a_plugin_raises_at_the_end_reaches_the_caller(rig: Any, finalized: Any) -> None:
    class Stumbles:
        @hookimpl
        def kvarena_pool_closing(self, pool: Any) -> None:
            raise ZeroDivisionError("at the end")

    rig.plug(Stumbles())
    with pytest.raises(KvArenaError, match="at the end"):
        finalized.bound.close()
    assert finalized.bound.closed


def test_third_parties_hear_of_regions(rig: Any, finalized: Any, manager: Any) -> None:
    heard = []

    class Observer:
        @hookimpl
        def kvarena_region_registered(self, engine: Any, region: Any) -> None:
            heard.append(("+", engine.name, region.address))

        @hookimpl
        def kvarena_region_unregistered(self, engine: Any, region: Any) -> None:
            heard.append(("-", engine.name, region.address))

    rig.plug(Observer())
    kv = manager(finalized)
    kv.register_buffer_to_engine()
    kv.deregister_buffer_to_engine()
    base = finalized.bound.arena.base
    assert [entry for entry in heard if entry[2] == base] == [
        ("+", "mooncake", base),
        ("-", "mooncake", base),
    ]


def test_pools_that_are_not_ours_register_as_stock_does(rig: Any, manager: Any) -> None:
    kv = manager(rig.eager(256, 128))
    kv.register_buffer_to_engine()
    if rig.release.number >= 19:
        kv._register_staging_memory(1 << 20, 64)
        assert kv.engine.engine.held[1 << 20] == 64
    assert any(call[0] == "batch" for call in kv.engine.engine.calls)
    kv.deregister_buffer_to_engine()
    assert kv.connection_pool == {}


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_a_manager_that_registers_again_holds_each_byte_once(
    finalized: Any, manager: Any, backend: str
) -> None:
    """SGLang's release and resume of memory, for a manager that cannot unregister."""
    kv = manager(finalized, backend=backend)
    kv.register_buffer_to_engine()
    calls, held = list(kv.engine.engine.calls), list(kv.agent.held)
    kv.register_buffer_to_engine()
    assert kv.engine.engine.calls == calls
    assert kv.agent.held == held
    assert len(finalized.bound.ledgers) == 1
    finalized.bound.close()
    assert kv.engine.engine.held == {}
    assert kv.agent.held == []


def test_a_manager_of_memory_that_is_not_ours_may_list_what_it_likes(rig: Any, manager: Any) -> None:
    kv = manager(rig.eager(256, 128))
    kv.kv_args.aux_data_lens = [4096, 64]  # stock's zip ends with the shorter list
    kv.register_buffer_to_engine()
    assert 4096 in kv.engine.engine.held.values()


def test_nixl_registers_each_byte_once(finalized: Any, manager: Any) -> None:
    kv = manager(finalized, backend="nixl")
    kv.register_buffer_to_engine()
    arena = finalized.bound.arena
    assert sorted(kv.agent.held) == sorted(
        [(arena.base, arena.backed_bytes, "VRAM"), (kv.kv_args.aux_data_ptrs[0], 4096, "DRAM")]
    )
    finalized.bound.close()
    assert kv.agent.held == []


def test_sglang_itself_refuses_nixl_for_unified_memory(rig: Any, rig_module: Any) -> None:
    """What the docs say; when it takes NIXL, so can they."""
    if rig.release.number < 20:
        pytest.skip("PD with a unified hybrid-SWA pool came with 0.5.20")
    check = resolve("sglang.srt.arg_groups.kv_cache_hook.handle_unified_memory_pool")
    arguments = rig_module.planner_arguments(
        rig.release, disaggregation_mode="prefill", disaggregation_transfer_backend="nixl"
    )
    listed = getattr(
        resolve("sglang.srt.server_args.ServerArgs"), "_unified_memory_pd_transfer_backends", None
    )
    if listed is not None:  # since 0.5.21
        arguments._unified_memory_pd_transfer_backends = lambda: listed(None)
    with pytest.raises(AssertionError, match=r"mooncake.*'nixl'"):
        check(arguments)


@pytest.mark.parametrize("how", ["empty", "raise"])
def test_nixl_refusals_are_raised(finalized: Any, manager: Any, how: str) -> None:
    kv = manager(finalized, backend="nixl")
    kv.agent.refuse = how
    with pytest.raises(RegistrationError, match="nixl-"):
        kv.register_buffer_to_engine()
    assert kv.agent.held == []
    assert finalized.bound.ledgers == ()


class Store:
    """A key-value store's registration, for both linkers."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.code = 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        self.held[address] = nbytes
        return self.code

    def unregister_buffer(self, address: int) -> int:
        self.held.pop(address)
        return 0

    def register_memory(self, address: int, nbytes: int) -> bool:
        self.held[address] = nbytes
        return self.code == 0

    def deregister_memory(self, address: int) -> None:
        self.held.pop(address)


LINKERS = {
    "mooncake": ("mooncake_store.mooncake_direct_linker.MooncakeDirectLinker", "register_buffers"),
    "umbp": ("umbp.umbp_direct_linker.UMBPDirectLinker", "_register_buffers"),
}


@pytest.mark.parametrize("which", LINKERS)
def test_hicache_linkers_are_clipped(rig: Any, finalized: Any, which: str) -> None:
    """Stock registers ``untyped_storage().nbytes()``: the whole reservation."""
    if rig.release.number < 20:
        pytest.skip("direct linkers came with 0.5.20")
    path, method = LINKERS[which]
    linker = object.__new__(resolve(f"sglang.srt.mem_cache.storage.{path}"))
    store = Store()
    linker.storage = SimpleNamespace(store=store, client=store)
    views = [*finalized.kv.full_kv_pool.k_buffer, *finalized.kv.swa_kv_pool.v_buffer]
    linker.pools = {"kv": SimpleNamespace(get_hybrid_pool_buffer=lambda: views)}
    getattr(linker, method)()
    arena = finalized.bound.arena
    assert views[0].untyped_storage().nbytes() > arena.backed_bytes
    assert store.held == {arena.base: arena.backed_bytes}
    if which == "umbp":
        assert linker._registered == [(arena.base, arena.backed_bytes)]
    finalized.bound.close()
    assert store.held == {}


def test_hicache_linkers_raise_when_refused(rig: Any, finalized: Any) -> None:
    if rig.release.number < 20:
        pytest.skip("direct linkers came with 0.5.20")
    linker = object.__new__(resolve(f"sglang.srt.mem_cache.storage.{LINKERS['mooncake'][0]}"))
    store = Store()
    store.code = -5
    linker.storage = SimpleNamespace(store=store)
    linker.pools = {
        "kv": SimpleNamespace(get_hybrid_pool_buffer=lambda: [finalized.kv.full_kv_pool.k_buffer[0]])
    }
    with pytest.raises(RegistrationError, match="-5"):
        linker.register_buffers()


def test_real_mooncake_over_tcp(rig: Any, finalized: Any, manager: Any) -> None:
    """SGLang's own wrapper around a real engine, and a second one that writes across the sink's old end."""
    if rig.release.number != 23:
        pytest.skip("once is enough: on the newest release")
    pytest.importorskip("mooncake.engine", reason="no Mooncake", exc_type=ImportError)
    wrapper = resolve(
        "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine"
    )
    target, source = wrapper("127.0.0.1"), wrapper("127.0.0.1")
    kv = manager(finalized)
    kv.engine = target
    kv.register_buffer_to_engine()
    arena = finalized.bound.arena
    page = torch.full((8192,), 9, dtype=torch.uint8)
    assert source.engine.register_memory(page.data_ptr(), 8192) == 0
    at = arena.base + 1024
    assert source.transfer_sync(target.session_id, page.data_ptr(), at, 8192) == 0
    raw = finalized.pool._raw
    assert int(raw[1024 : 1024 + 8192].sum()) == 9 * 8192
    assert int(raw[: finalized.bound.total_bytes].sum()) == 9 * 8192
    end = arena.base + arena.backed_bytes
    assert source.transfer_sync(target.session_id, page.data_ptr(), end - 4096, 8192) != 0
    kv.deregister_buffer_to_engine()
    assert source.transfer_sync(target.session_id, page.data_ptr(), at, 8192) != 0
    assert source.engine.unregister_memory(page.data_ptr()) == 0


def test_each_gpu_of_a_host_has_a_metrics_port_of_its_own(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] - 3
    told = msgspec.structs.replace(runtime.settings, metrics_port=port)
    monkeypatch.setattr(runtime, "settings", told)
    monkeypatch.setattr("kvarena.plugin.engines.sglang.report.gpu_index", lambda bound: 3)
    report = rig.reserved(256, 128).bound.observer
    assert report is not None
    assert report.reporter.metrics_address == f"127.0.0.1:{port + 3}"
