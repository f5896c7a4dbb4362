"""A pool's life through the hooks: order, rollback, retries, growth, close."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from kvarena.errors import KvArenaError
from kvarena.hooks import HookError, hookimpl
from kvarena.plugin.composition import make_manager
from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.lifecycle import PoolLifecycle
from kvarena.plugin.ranks import RankReport
from kvarena.pool import (
    HostVmm,
    MHASubPoolSpec,
    OutOfMemoryError,
    PoolSizeError,
    RanksDisagreeError,
    Refusal,
    SizingRequest,
    UnifiedKVPool,
    UnifiedSWATokenToKVPoolAllocator,
    resize_for,
)
from kvarena.pool.testing import FailingDriver
from kvarena.transfer import RecordingEngine, Region, RegistrationError
from kvarena.transfer.protocol import TransferEngine

MIB = 1 << 20
SPECS = (
    MHASubPoolSpec(
        name="full", grow_direction="up", layer_num=2, head_num=2, head_dim=32, dtype=torch.float32
    ),
    MHASubPoolSpec(
        name="swa", grow_direction="down", layer_num=3, head_num=2, head_dim=32, dtype=torch.float32
    ),
)


class Watcher:
    """A third party: brings a recording engine and a driver, and writes down what it hears."""

    plugin_name = "watcher"

    def __init__(self, driver: object, *, fail_in: str = "") -> None:
        self.driver = driver
        self.engine = RecordingEngine("recording", moves_memory=False)
        self.heard: list[tuple[Any, ...]] = []
        self.fail_in = fail_in

    @hookimpl
    def kvarena_driver(self, device: object) -> object:
        return self.driver

    @hookimpl
    def kvarena_transfer_engines(self, config: object) -> list[object]:
        return [self.engine]

    @hookimpl
    def kvarena_pool_reserved(self, pool: UnifiedKVPool) -> None:
        self._hear("reserved", pool)

    @hookimpl
    def kvarena_pool_resizing(self, pool: UnifiedKVPool, keep_bytes: int) -> None:
        self.heard.append(("resizing", keep_bytes))

    @hookimpl
    def kvarena_pool_finalized(self, pool: UnifiedKVPool, resize: object) -> None:
        self._hear("finalized", pool)

    @hookimpl
    def kvarena_pool_closing(self, pool: UnifiedKVPool) -> None:
        self._hear("closing", pool)

    @hookimpl
    def kvarena_region_registered(self, engine: TransferEngine, region: Region) -> None:
        self.heard.append(("registered", region.nbytes))

    @hookimpl
    def kvarena_region_unregistered(self, engine: TransferEngine, region: Region) -> None:
        self.heard.append(("unregistered", region.nbytes))

    def _hear(self, what: str, pool: UnifiedKVPool) -> None:
        self.heard.append((what, pool.arena.backed_bytes))
        if what == self.fail_in:
            raise ZeroDivisionError(what)


class Life:
    """A lifecycle with its watcher, allocator and driver in hand."""

    def __init__(
        self, *, settings: Settings | None = None, limit: int = 8 * MIB, fail_in: str = "", ranks: Any = None
    ) -> None:
        self.host = HostVmm(memory_limit=limit)
        self.driver = FailingDriver(self.host)
        self.watcher = Watcher(self.driver, fail_in=fail_in)
        settings = settings or Settings(load_plugins=False, finalize_retries=0)
        manager = make_manager(settings)
        manager.register(self.watcher, "watcher")
        self.life = PoolLifecycle(settings, device="cpu", manager=manager, ranks=ranks)

    def reserve(self) -> UnifiedKVPool:
        self.pool = self.life.reserve(SPECS, total_bytes=16 * MIB, page_size=4)
        self.allocator = UnifiedSWATokenToKVPoolAllocator(self.pool)
        return self.pool

    def finalize(self, nbytes: int) -> None:
        self.life.finalize(resize_for(self.pool, nbytes), self.allocator)

    @property
    def registered(self) -> list[int]:
        return [region.nbytes for ledger in self.life.ledgers for region in ledger.regions]


@pytest.fixture
def life() -> Iterator[Life]:
    made = Life()
    yield made
    made.driver.fail_at = None
    made.watcher.fail_in = ""
    made.life.close()
    assert made.host.free_bytes() == 8 * MIB


def test_the_whole_life_in_order(life: Life) -> None:
    pool = life.reserve()
    base, sink = pool.arena.base, pool.arena.backed_bytes
    assert life.registered == [sink]
    budget = life.life.budget()
    assert budget == 8 * MIB - sink
    life.finalize(budget)
    assert (pool.total_bytes, pool.arena.base, pool.raw.data_ptr()) == (budget, base, base)
    assert life.registered == [budget]
    life.life.close()
    assert life.registered == []
    assert [event.name for event in life.life.timeline.events] == [
        "reserved", "sink", "registered", "budget", "finalized", "registered", "closed",
    ]  # fmt: skip
    assert life.watcher.heard == [
        ("registered", sink),
        ("reserved", sink),
        # The sink's memory is replaced by the swap: nothing may be registered over it meanwhile.
        ("resizing", 0),
        ("unregistered", sink),
        ("registered", budget),
        ("finalized", budget),
        ("closing", budget),
        ("unregistered", budget),
    ]


def _state(life: Life) -> tuple[object, ...]:
    pool, allocator = life.pool, life.allocator
    return (
        pool.finalized,
        pool.total_bytes,
        pool.arena.backed_bytes,
        pool.raw.data_ptr(),
        allocator.size_full,
        allocator.size_swa,
        allocator.full.virtual_to_physical.data_ptr(),
        tuple(life.registered),
        life.host.free_bytes(),
        life.life.reporter.pool_status().tokens,
    )


@pytest.mark.parametrize("where", ["hook", "engine", "allocator"])
def test_a_finalize_that_fails_anywhere_leaves_everything_as_it_was(life: Life, where: str) -> None:
    life.reserve()
    before = _state(life)
    if where == "hook":
        life.watcher.fail_in = "finalized"
        expected: type[KvArenaError] = HookError
    elif where == "engine":
        life.watcher.engine.capabilities = _refusing(life.watcher.engine)
        expected = RegistrationError
    else:
        expected = KvArenaError
        life.allocator.resize = _raise  # type: ignore[method-assign]
    with pytest.raises(expected):
        life.finalize(4 * MIB)
    assert _state(life) == before
    # And the next try succeeds.
    life.watcher.fail_in = ""
    if where == "engine":
        del life.watcher.engine.register  # type: ignore[method-assign]
    if where == "allocator":
        del life.allocator.resize  # type: ignore[method-assign]
    life.finalize(4 * MIB)
    assert life.registered == [4 * MIB]


def _raise(config: object) -> None:
    raise KvArenaError("the allocator refuses")


def _refusing(engine: RecordingEngine) -> Any:
    register = engine.register

    def refuse(regions: Sequence[Region]) -> None:
        if any(region.nbytes > MIB for region in regions):
            raise RegistrationError(engine.name, regions[0], -7)
        register(regions)

    engine.register = refuse  # type: ignore[method-assign]
    return engine.capabilities


def test_every_driver_call_of_finalize_may_fail(life: Life) -> None:
    life.reserve()
    before = _state(life)
    calls = 0
    while True:
        calls += 1
        life.driver.fail_at = calls
        try:
            life.finalize(4 * MIB)
        except KvArenaError:
            life.driver.fail_at = None
            assert _state(life) == before, f"call {calls}"
        else:
            break
    life.driver.fail_at = None
    assert calls > 4
    assert life.registered == [4 * MIB]


def test_out_of_memory_is_retried_with_less() -> None:
    made = Life(settings=Settings(load_plugins=False, finalize_retries=4))
    made.reserve()
    # As if another process had taken memory between measuring and backing.
    budget = made.life.budget()
    other = made.host.create(made.host.granularity * 8)
    made.finalize(budget)
    assert 0.9 * budget < made.pool.total_bytes < budget
    assert made.registered == [made.pool.arena.backed_bytes]
    made.life.close()
    made.host.release(other)
    assert made.host.free_bytes() == 8 * MIB


def test_a_retry_leaves_the_headroom_free() -> None:
    # It took all that was left: 16 of 64 MiB should stay free, and 0.05 did.
    settings = Settings(load_plugins=False, headroom=2 * MIB, finalize_retries=4)
    made = Life(settings=settings)
    made.reserve()
    budget = made.life.budget()
    other = made.host.create(3 * MIB)
    made.finalize(budget)
    assert made.host.free_bytes() >= 2 * MIB
    assert made.pool.total_bytes > MIB
    made.life.close()
    made.host.release(other)


def test_a_headroom_that_went_after_measuring_is_missed_even_when_backing_would_succeed() -> None:
    made = Life(settings=Settings(load_plugins=False, headroom=2 * MIB, finalize_retries=4))
    made.reserve()
    budget = made.life.budget()
    other = made.host.create(MIB)
    made.finalize(budget)
    assert made.host.free_bytes() >= 2 * MIB
    made.life.close()
    made.host.release(other)


@pytest.mark.parametrize("maximum", [4 * MIB, 4 * MIB + 1, 4 * MIB - 1])
def test_the_operators_limit_is_never_exceeded(maximum: int) -> None:
    # It was by up to a granule, and by any finalize that asked for more.
    made = Life(settings=Settings(load_plugins=False, pool_bytes=maximum))
    pool = made.reserve()
    assert made.life.budget() <= maximum
    made.finalize(5 * MIB)
    assert pool.total_bytes <= pool.arena.backed_bytes <= maximum
    made.life.close()


def test_a_retry_keeps_what_bytes_do_not_decide() -> None:
    made = Life(settings=Settings(load_plugins=False, finalize_retries=4))
    pool = made.reserve()
    asked = msgspec.structs.replace(
        resize_for(pool, made.life.budget()), capped_max_running_requests=7, max_total_num_tokens=64
    )
    other = made.host.create(MIB)
    stands = made.life.finalize(asked, made.allocator)
    assert (stands.capped_max_running_requests, stands.max_total_num_tokens) == (7, 64)
    assert stands.unified_memory_pool_bytes == pool.total_bytes < 7 * MIB
    made.life.close()
    made.host.release(other)


def test_a_hook_reads_the_new_bounds_on_growth(life: Life) -> None:
    seen: list[tuple[int, int]] = []

    class Reads:
        @hookimpl
        def kvarena_pool_finalized(self, pool: UnifiedKVPool) -> None:
            seen.append((pool.max_slots("full"), life.allocator.full.max_slots))

    life.reserve()
    life.finalize(4 * MIB)
    life.life.manager.register(Reads(), "reads")
    life.life.grow(6 * MIB, life.allocator)
    life.life.shrink(4 * MIB, life.allocator)
    assert len(seen) == 2
    assert all(told == bound for told, bound in seen), seen


class Pair:
    """Two ranks on two threads, which meet in every exchange."""

    count = 2

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._said: dict[str, RankReport] = {}

    def rank(self, index: int) -> Pair:
        made = copy.copy(self)
        made.index = index  # type: ignore[attr-defined]
        return made

    def exchange(self, mine: RankReport) -> list[RankReport]:
        self._said[str(self.index)] = mine  # type: ignore[attr-defined]
        self._barrier.wait()
        heard = [self._said["0"], self._said["1"]]
        self._barrier.wait()
        return heard


def _finalize_pair(taken: list[int], retries: int = 4) -> tuple[list[Life], list[object]]:
    pair, settings = Pair(), Settings(load_plugins=False, finalize_retries=retries, status=False)
    lives = [Life(settings=settings, ranks=pair.rank(index)) for index in range(2)]
    outcomes: list[object] = [None, None]
    sizes = []
    for life in lives:
        life.reserve()
        sizes.append(resize_for(life.pool, life.life.budget()))
    others = [life.host.create(nbytes) if nbytes else None for life, nbytes in zip(lives, taken, strict=True)]

    def run(index: int) -> None:
        try:
            outcomes[index] = lives[index].life.finalize(sizes[index], lives[index].allocator)
        except KvArenaError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for life, other in zip(lives, others, strict=True):
        if other is not None:
            life.host.release(other)
    return lives, outcomes


def test_ranks_end_with_one_size_when_one_has_lost_memory() -> None:
    # 8 MiB taken on rank 1 after the agreement gave 43 616 tokens on rank 0, 38 160 on rank 1, and no error.
    lives, outcomes = _finalize_pair([0, 2 * MIB])
    assert outcomes[0] == outcomes[1]
    assert [life.pool.total_bytes for life in lives] == [lives[0].pool.total_bytes] * 2
    assert 5 * MIB < lives[0].pool.total_bytes < 6 * MIB
    assert lives[0].allocator.size_full == lives[1].allocator.size_full
    for life in lives:
        life.life.close()


def test_no_rank_keeps_a_size_that_another_could_not_have() -> None:
    lives, outcomes = _finalize_pair([0, 2 * MIB], retries=0)
    assert all(isinstance(outcome, RanksDisagreeError) for outcome in outcomes), outcomes
    for life in lives:
        assert not life.pool.finalized
        assert life.registered == [life.pool.arena.backed_bytes]
        life.life.close()


def test_out_of_memory_without_retries_says_so(life: Life) -> None:
    life.reserve()
    before = _state(life)
    with pytest.raises(OutOfMemoryError, match="asked for"):
        life.finalize(8 * MIB)
    assert _state(life) == before


def test_grow_and_give_back_with_tokens_in_use(life: Life) -> None:
    life.reserve()
    life.finalize(4 * MIB)
    ids = life.allocator.alloc(64)
    assert ids is not None
    life.life.grow(6 * MIB, life.allocator)
    assert sum(life.registered) == 6 * MIB
    assert life.pool.total_bytes == 6 * MIB
    assert life.allocator.verify_byte_accounting() == []
    life.life.shrink(4 * MIB, life.allocator)
    assert sum(life.registered) == life.pool.total_bytes == 4 * MIB
    life.allocator.free(ids)
    assert life.allocator.available_size() > 0


def test_a_grow_whose_registration_fails_gives_the_memory_back(life: Life) -> None:
    life.reserve()
    life.finalize(4 * MIB)
    before = _state(life)
    life.watcher.fail_in = "finalized"
    with pytest.raises(HookError):
        life.life.grow(6 * MIB, life.allocator)
    assert _state(life) == before


def test_a_shrink_that_a_plugin_fails_is_undone_handle_by_handle(life: Life) -> None:
    """The undo joined the handles, and sizes that were legal before were refused afterwards."""
    life.reserve()
    life.finalize(4 * MIB)
    for size in (5 * MIB, 6 * MIB, 7 * MIB):
        life.life.grow(size, life.allocator)
    before = [(each.offset, each.nbytes) for each in life.pool.arena.mappings]
    life.watcher.fail_in = "finalized"
    with pytest.raises(HookError):
        life.life.shrink(4 * MIB, life.allocator)
    life.watcher.fail_in = ""
    assert [(each.offset, each.nbytes) for each in life.pool.arena.mappings] == before
    assert sum(life.registered) == life.pool.total_bytes == 7 * MIB
    life.life.shrink(6 * MIB, life.allocator)
    assert sum(life.registered) == life.pool.total_bytes == 6 * MIB


def test_give_back_of_pinned_pages_is_refused_with_everything_as_it_was(life: Life) -> None:
    life.reserve()
    life.finalize(4 * MIB)
    life.life.grow(6 * MIB, life.allocator)
    held = []
    while (ids := life.allocator.alloc(256)) is not None:
        held.append(ids)
    before = _state(life)
    with pytest.raises(KvArenaError):
        life.life.shrink(4 * MIB, life.allocator)
    assert _state(life) == before
    for ids in held:
        life.allocator.free(ids)


def test_close_reaches_everyone_and_reports_the_failure() -> None:
    made = Life(fail_in="closing")
    made.reserve()
    with pytest.raises(HookError, match="'watcher' failed in kvarena_pool_closing"):
        made.life.close()
    assert made.life.pool is None
    assert made.host.free_bytes() == 8 * MIB
    made.life.close()


def test_memory_stays_while_a_ledger_cannot_let_go() -> None:
    made = Life()
    pool = made.reserve()
    engine = made.watcher.engine
    unregister = engine.unregister

    def stuck(regions: Sequence[Region]) -> None:
        raise RegistrationError(engine.name, regions[0], -3)

    engine.unregister = stuck  # type: ignore[method-assign]
    with pytest.raises(RegistrationError):
        made.life.close()
    assert pool.arena.backed_bytes > 0
    assert made.registered == [pool.arena.backed_bytes]
    engine.unregister = unregister  # type: ignore[method-assign]
    made.life.close()
    assert made.host.free_bytes() == 8 * MIB


def test_a_reserve_that_fails_leaves_nothing(life: Life) -> None:
    life.watcher.fail_in = "reserved"
    with pytest.raises(HookError):
        life.reserve()
    assert life.life.pool is None
    assert life.host.free_bytes() == 8 * MIB
    life.watcher.fail_in = ""
    life.watcher.engine = RecordingEngine("recording", moves_memory=False)
    life.reserve()


def test_a_budget_below_the_floor_names_the_least(life: Life) -> None:
    pool = life.reserve()
    with pytest.raises(PoolSizeError) as info:
        life.finalize(1)
    assert info.value.minimum == pool.floor_bytes
    assert str(pool.floor_bytes) in str(info.value)


def test_an_unknown_engine_is_named() -> None:
    settings = Settings(load_plugins=False, transfer=("pigeon",))
    with pytest.raises(ConfigError, match=r"pigeon.*KVARENA_LOAD_PLUGINS=0 loads none"):
        PoolLifecycle(settings, device="cpu").reserve(SPECS, total_bytes=MIB, page_size=4)
    settings = Settings(block_plugins=("loft",), transfer=("pigeon",))
    with pytest.raises(ConfigError, match=r"pigeon.*KVARENA_BLOCK_PLUGINS leaves out loft"):
        PoolLifecycle(settings, device="cpu").reserve(SPECS, total_bytes=MIB, page_size=4)


def test_a_device_without_a_driver_is_named() -> None:
    with pytest.raises(ConfigError, match="meta"):
        _ = PoolLifecycle(Settings(load_plugins=False), device="meta").driver


def test_refusals_of_everyone_are_collected_once(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    class Refuses:
        @hookimpl
        def kvarena_refusals(self, request: SizingRequest) -> list[Refusal]:
            return [Refusal(code="mine", setting="MY_SETTING", reason="MY_SETTING=1 forbids it")] * 2

    life.life.manager.register(Refuses(), "refuses")
    refusals = life.life.plan(SizingRequest())
    assert [refusal.code for refusal in refusals].count("mine") == 1
    assert len(refusals) > 1, "the built-in reasons are there too"
    assert "MY_SETTING=1 forbids it" in caplog.text
