"""The resize after capture through SGLang's own functions: sized, backed, resized, or as before."""

from __future__ import annotations

import contextlib
import logging
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from kvarena.errors import KvArenaError
from kvarena.hooks import HookError, hookimpl
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.ranks import RankReport
from kvarena.pool import HostVmm, OutOfMemoryError
from kvarena.pool.errors import PoolStateError
from kvarena.pool.sizing import RanksDisagreeError
from kvarena.pool.testing import FailingDriver

pytestmark = pytest.mark.sglang

FREE = 40_000
GRANULE = 4096


@pytest.fixture
def served(rig: Any, rig_module: Any, runner_module: ModuleType) -> Any:
    """Build a pool and the runner that will resize it."""
    rig.release.publish(page_size=4, enable_unified_memory=True, swa_full_tokens_ratio=0.8)

    def build(*, driver: Any = None, free_bytes: int = FREE) -> tuple[Any, Any]:
        if driver is not None:
            rig.use_driver(driver)
        bundle = rig.reserved(256, 128)
        return bundle, runner_module.runner(rig, rig_module, bundle, page_size=4, free_bytes=free_bytes)

    return build


@pytest.fixture
def observer(rig: Any) -> Any:
    """A third party that writes down what it hears."""

    class Observer:
        def __init__(self) -> None:
            self.heard: list[tuple[str, int]] = []
            self.broken = False

        @hookimpl
        def kvarena_pool_reserved(self, pool: Any) -> None:
            self.heard.append(("reserved", pool.active_allocation_bytes))

        @hookimpl
        def kvarena_pool_resizing(self, pool: Any, keep_bytes: int) -> None:
            assert keep_bytes == 0
            assert pool.arena.mappings  # before the memory goes
            self.heard.append(("resizing", pool.active_allocation_bytes))

        @hookimpl
        def kvarena_pool_finalized(self, pool: Any, resize: Any) -> None:
            if self.broken:
                raise ZeroDivisionError("an observer of anybody's")
            assert resize.unified_memory_pool_bytes == pool.total_bytes
            self.heard.append(("finalized", pool.active_allocation_bytes))

        @hookimpl
        def kvarena_pool_closing(self, pool: Any) -> None:
            self.heard.append(("closing", pool.arena.backed_bytes))

    made = Observer()
    rig.plug(made)
    return made


def test_the_pool_gets_what_is_free_and_the_sink(
    served: Any, runner_module: Any, observer: Any, rig: Any
) -> None:
    bundle, runner = served()
    base = bundle.bound.arena.base
    runner_module.resize(runner)
    bound = bundle.bound
    budget = FREE + GRANULE  # the sink's handle is taken already
    page = bound.page_bytes("full") + bound.page_bytes("swa")
    assert budget - page - GRANULE < bound.total_bytes <= budget
    assert bound.arena.base == base
    assert len(bound.arena.mappings) == 1
    assert runner.max_total_num_tokens == runner.memory_pool_config.max_total_num_tokens
    assert runner.memory_pool_config.unified_memory_pool_bytes == bound.total_bytes
    sink = bound.sink_bytes
    assert observer.heard == [("reserved", sink), ("resizing", sink), ("finalized", bound.total_bytes)]
    bound.close()
    assert [event for event, _ in observer.heard][3:] == ["closing"]


def test_what_was_resized_equals_a_pool_built_so(
    served: Any, runner_module: Any, rig: Any, rig_module: Any
) -> None:
    bundle, runner = served()
    runner_module.resize(runner)
    config = runner.memory_pool_config
    sides = config.full_max_total_num_tokens, config.swa_max_total_num_tokens
    nbytes = None if rig.release.number <= 18 else bundle.bound.total_bytes
    assert rig_module.scalars(bundle) == rig_module.scalars(rig.eager(*sides, nbytes=nbytes))


def test_sglangs_poison_reaches_what_finalize_backs_and_spares_the_sink(
    served: Any, runner_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(resolve("sglang.srt.environ.envs"), "SGLANG_DEBUG_POISON_POOL"):
        pytest.skip("this release has no such switch")
    bundle, runner = served()
    monkeypatch.setenv("SGLANG_DEBUG_POISON_POOL", "1")
    runner_module.resize(runner)
    sink, end = bundle.bound.sink_bytes, bundle.bound.total_bytes // 2 * 2
    assert not bundle.pool._raw[:sink].any()
    assert bundle.pool._raw[sink:end].view(torch.bfloat16).isnan().all()


class Boastful:
    """A device that has less than it says: fragmentation, or another process that was faster."""

    def __init__(self, limit: int) -> None:
        self._driver = HostVmm(memory_limit=FREE + GRANULE)
        self._limit = limit
        self.refused: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def create(self, nbytes: int) -> int:
        if nbytes > self._limit:
            self.refused.append(nbytes)
            raise OutOfMemoryError("create", "ENOMEM", requested=nbytes, free=self._limit)
        return self._driver.create(nbytes)


def test_out_of_memory_backs_off(served: Any, runner_module: Any, caplog: pytest.LogCaptureFixture) -> None:
    driver = Boastful(30_000)
    bundle, runner = served(driver=driver)
    runner_module.resize(runner)
    bound = bundle.bound
    assert driver.refused
    assert 16_000 < bound.total_bytes <= 30_000
    assert len(bound.arena.mappings) == 1
    assert runner.memory_pool_config.unified_memory_pool_bytes == bound.total_bytes
    assert bundle.allocator.available_size() > 0
    assert "all ranks try again" in caplog.text


@pytest.mark.parametrize("headroom", [0, 6 * GRANULE])
def test_a_retry_leaves_free_what_sglang_and_the_operator_keep(
    served: Any, runner_module: Any, monkeypatch: pytest.MonkeyPatch, headroom: int
) -> None:
    """The retry took all that was left, and SGLang's next allocation ended the server."""
    monkeypatch.setattr(runtime, "settings", msgspec.structs.replace(runtime.settings, headroom=headroom))
    kept = 5 * GRANULE
    driver = Taken(FREE // GRANULE * GRANULE + kept + GRANULE)
    bundle, runner = served(driver=driver)
    driver.takes = 4 * GRANULE  # by somebody else, after SGLang has measured
    runner_module.resize(runner)
    assert bundle.bound.finalized
    assert driver.taken
    assert driver.free_bytes() >= max(kept, headroom)


class Taken:
    """A device of which another process takes memory at the first backing that is large."""

    def __init__(self, limit: int) -> None:
        self._driver = HostVmm(memory_limit=limit)
        self.takes, self.taken = 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def create(self, nbytes: int) -> int:
        if self.takes and nbytes > GRANULE:
            self.taken, self.takes = self._driver.create(self.takes), 0
        return self._driver.create(nbytes)


def test_the_undo_of_a_resize_allocates_nothing_beside_the_sink(
    served: Any, runner_module: Any, rig_module: Any, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made SGLang's free lists anew, on a device that was full."""
    bundle, runner = served()
    before = rig_module.scalars(bundle)
    observer.broken = True

    def reverted(saved: Any) -> None:
        monkeypatch.setattr(torch, "arange", _raise)
        monkeypatch.setattr(torch, "empty", _raise)
        restore(saved)
        monkeypatch.undo()

    from kvarena.plugin.engines.sglang.capacity import Saved

    restore = Saved.restore
    monkeypatch.setattr(Saved, "restore", reverted)
    with pytest.raises(HookError) as caught:
        runner_module.resize(runner)
    assert not getattr(caught.value, "__notes__", [])
    assert rig_module.scalars(bundle) == before


def test_out_of_memory_for_good_is_an_error_and_everything_is_as_before(
    served: Any, runner_module: Any, rig_module: Any
) -> None:
    driver = Boastful(GRANULE)
    bundle, runner = served(driver=driver)
    before = rig_module.scalars(bundle)
    with pytest.raises((OutOfMemoryError, RanksDisagreeError)):
        runner_module.resize(runner)
    assert driver.refused == sorted(driver.refused, reverse=True)
    assert rig_module.scalars(bundle) == before
    assert bundle.bound.active_allocation_bytes == bundle.bound.sink_bytes


def test_when_nothing_fits_everything_is_as_before(
    served: Any, runner_module: Any, rig_module: Any, observer: Any
) -> None:
    driver = HostVmm(memory_limit=GRANULE + 100)
    bundle, runner = served(driver=driver)
    before, config = rig_module.scalars(bundle), vars(runner.memory_pool_config).copy()
    mappings = bundle.bound.arena.mappings
    with pytest.raises((OutOfMemoryError, RanksDisagreeError)):
        runner_module.resize(runner)
    bound = bundle.bound
    assert rig_module.scalars(bundle) == before
    assert vars(runner.memory_pool_config) == config
    assert runner.max_total_num_tokens > 10**8 or runner.max_total_num_tokens == 256
    assert [m.nbytes for m in bound.arena.mappings] == [m.nbytes for m in mappings]
    assert bound.active_allocation_bytes == bound.sink_bytes
    bundle.pool._raw[: bound.sink_bytes].fill_(1)  # graphs may still write here
    assert ("finalized", bound.total_bytes) not in observer.heard


@pytest.mark.parametrize("op", ["create", "map", "unmap", "zero"])
def test_a_driver_that_fails_once_leaves_the_sink(
    served: Any, runner_module: Any, rig_module: Any, op: str
) -> None:
    driver = FailingDriver(HostVmm(), ops=(op,))
    bundle, runner = served(driver=driver)
    before = rig_module.scalars(bundle)
    driver.fail_at = 1
    with contextlib.suppress(KvArenaError):
        # Where no other attempt was due: one rank raises what the driver said.
        runner_module.resize(runner)
    driver.fail_at = None
    if not bundle.bound.finalized:
        assert rig_module.scalars(bundle) == before
        assert bundle.bound.active_allocation_bytes == bundle.bound.sink_bytes
        bundle.pool._raw[: bundle.bound.sink_bytes].fill_(1)
        runner_module.resize(runner)
    assert bundle.bound.finalized
    assert bundle.allocator.available_size() > 0


def test_a_hook_that_raises_undoes_the_resize_and_is_named(
    served: Any, runner_module: Any, rig_module: Any, observer: Any
) -> None:
    bundle, runner = served()
    before = rig_module.scalars(bundle)
    tokens = runner.max_total_num_tokens
    observer.broken = True
    with pytest.raises(HookError, match="an observer of anybody's"):
        runner_module.resize(runner)
    assert rig_module.scalars(bundle) == before
    assert runner.max_total_num_tokens == tokens
    assert bundle.bound.active_allocation_bytes == bundle.bound.sink_bytes
    sink = bundle.bound.sink_bytes
    assert observer.heard[:2] == [("reserved", sink), ("resizing", sink)]
    # Who heard of the new size lets go of it, and hears of the sink.
    assert [event for event, _ in observer.heard[2:]] == ["resizing", "reserved"]
    assert observer.heard[2][1] > sink
    assert observer.heard[3] == ("reserved", sink)
    observer.broken = False
    runner_module.resize(runner)
    assert bundle.bound.finalized


def test_a_report_that_fails_does_not_undo_what_every_rank_has(
    served: Any, runner_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, runner = served()
    monkeypatch.setattr(bundle.bound.observer.timeline, "add", _raise)
    runner_module.resize(runner)
    assert bundle.bound.finalized
    assert runner.memory_pool_config.unified_memory_pool_bytes == bundle.bound.total_bytes
    assert bundle.allocator.available_size() > 0
    assert "this cannot be reported" in caplog.text


def test_a_setting_that_leaves_too_little_is_named(
    served: Any, runner_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error blames SGLang's own flags."""
    changed = msgspec.structs.replace(runtime.settings, pool_bytes=1000)
    monkeypatch.setattr(runtime, "settings", changed)
    bundle, runner = served()
    with caplog.at_level(logging.INFO, "kvarena.sglang"), pytest.raises(KvArenaError):
        runner_module.resize(runner)
    line = f"measured {FREE + GRANULE} bytes for the pool, of which it may have 0"  # whole granules only
    assert any(line in r.getMessage() and "KVARENA_POOL_BYTES" in r.getMessage() for r in caplog.records)
    assert bundle.bound.active_allocation_bytes == bundle.bound.sink_bytes


def test_an_allocator_that_cannot_resize_undoes_the_backing(
    served: Any, runner_module: Any, rig: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, runner = served()
    before = rig_module.scalars(bundle)
    monkeypatch.setattr(type(bundle.sides[1]), "clear", _raise, raising=True)
    with pytest.raises(ZeroDivisionError):
        runner_module.resize(runner)
    monkeypatch.undo()
    assert bundle.bound.active_allocation_bytes == bundle.bound.sink_bytes
    assert bundle.pool.total_bytes == bundle.bound.reserved_bytes
    assert rig_module.scalars(bundle) == before


def test_what_fails_in_sglang_after_everything_was_resized_undoes_it(
    served: Any, runner_module: Any, rig_module: Any, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, runner = served()
    before, config = rig_module.scalars(bundle), vars(runner.memory_pool_config).copy()
    runner.max_running_requests = 2  # looked at last
    monkeypatch.setattr(type(runner.kv_cache_configurator), "resolve_max_num_reqs", _raise)
    with pytest.raises(ZeroDivisionError):
        runner_module.resize(runner)
    assert rig_module.scalars(bundle) == before
    assert vars(runner.memory_pool_config) == config
    assert observer.heard[-1] == ("reserved", bundle.bound.sink_bytes)
    runner.max_running_requests = None
    runner_module.resize(runner)
    assert bundle.allocator.available_size() > 0


def test_a_second_resize_is_refused_and_changes_nothing(
    served: Any, runner_module: Any, rig_module: Any, observer: Any
) -> None:
    bundle, runner = served()
    runner_module.resize(runner)
    locations = bundle.allocator.alloc(8)
    before, config = rig_module.scalars(bundle), vars(runner.memory_pool_config).copy()
    heard, tokens = list(observer.heard), runner.max_total_num_tokens
    bundle.pool._raw[: bundle.bound.total_bytes].fill_(5)
    with pytest.raises(PoolStateError, match="finalized already"):
        runner_module.resize(runner)
    assert rig_module.scalars(bundle) == before
    assert vars(runner.memory_pool_config) == config
    assert (observer.heard, runner.max_total_num_tokens) == (heard, tokens)
    assert bool((bundle.pool._raw[: bundle.bound.total_bytes] == 5).all())
    bundle.allocator.free(locations)


class Two:
    """This process twice; the other half has less memory."""

    count = 2

    def exchange(self, mine: RankReport) -> list[RankReport]:
        return [mine, mine._replace(tokens=mine.tokens * 3 // 4)]


def test_with_several_ranks_the_least_tokens_decide_and_stock_does_not_reduce(
    served: Any, runner_module: Any, rig: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock's own reduction inside ``config_from_budget`` would wait for a rank that failed before it."""
    bundle, runner = served()
    monkeypatch.setattr("kvarena.plugin.engines.sglang.finalize.ranks_of_sglang", Two)
    monkeypatch.setattr(type(runner.kv_cache_configurator), "_apply_token_constraints", _raise)
    runner_module.resize(runner)
    tokens = runner.max_total_num_tokens
    assert 100 < tokens < 128  # three quarters of what fits
    assert tokens % 4 == 0
    window = runner.memory_pool_config.swa_max_total_num_tokens
    assert bundle.bound.total_bytes == rig.total_bytes(tokens, window)
    assert rig_module.scalars(bundle) == rig_module.scalars(rig.eager(tokens, window))


def test_third_parties_and_settings_lower_the_budget(
    served: Any, runner_module: Any, rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Frugal:
        @hookimpl
        def kvarena_budget(self, request: Any) -> int:
            assert request.max_bytes == FREE + GRANULE
            assert request.pool.arena.backed_bytes == GRANULE
            return 25_000

    rig.plug(Frugal())
    bundle, runner = served()
    runner_module.resize(runner)
    assert 22_000 < bundle.bound.total_bytes <= 25_000


def _raise(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


def test_upstreams_own_finalize_is_the_oracle(rig: Any, rig_module: Any) -> None:
    """Our pool after our finalize, and stock's own finalize over memory that is all there."""
    if not rig.release.hardened:
        pytest.skip("there is no finalize upstream before 0.5.22")
    pools, allocators = rig.release.pools, type(rig.eager(64, 64).allocator)
    finalize = pools.UnifiedKVPool.finalize_backing.__wrapped__
    resize = allocators.resize.__wrapped__
    for sides in ((164, 84), (200, 100), (48, 20)):
        ours, oracle = rig.reserved(256, 128), rig.eager(256, 128)
        oracle.pool.post_capture_active = True
        oracle.pool._post_capture_owner = _Owner()
        config = rig.config(*sides)
        finalize(oracle.pool, config)
        resize(oracle.allocator, config)
        ours.resize(config)
        mine, theirs = rig_module.scalars(ours), rig_module.scalars(oracle)
        differ = {name for name in mine if mine[name] != theirs[name]}
        # Stock rounds slots to pages where an eager pool does not, and leaves an upper bound of moves.
        assert {name.rpartition(".")[2] for name in differ} <= {
            "max_slots",
            "size",
            "size_swa",
            "_move_max_pages",
        }
        for name in (
            "available_size",
            "size",
            "allocator._size_full",
            "allocator._size_swa",
            "pool.total_bytes",
        ):
            assert mine[name] == theirs[name]


class _Owner:
    backed_bytes = 0

    def ensure_prefix(self, nbytes: int) -> None:
        assert nbytes > 0


def test_upstreams_fixtures_run_over_an_arena(rig: Any) -> None:
    """SGLang's own builders for its allocator tests, with our constructor beneath."""
    if not rig.release.hardened:
        pytest.skip("sglang.test.unified_allocator_fixtures came with 0.5.22")
    from sglang.test import unified_allocator_fixtures as fixtures

    fixtures.setup_allocator_context()
    runtime.planned = True
    allocator = fixtures.build_swa_pool(page_size=1)
    assert not runtime.pools  # the fixture builds eager pools
    specs = fixtures.tri_sub_pool_specs()
    pool = rig.release.pools.UnifiedKVPool(
        total_bytes=1 << 20,
        sub_pool_specs=specs,
        device="cpu",
        enable_memory_saver=False,
        page_size=4,
        post_capture_active=True,
    )
    (bound,) = runtime.pools
    assert bound.pool is pool
    assert {spec.name for spec in pool.sub_pool_specs} == {"full", "swa", "mamba"}
    config = type("Config", (), {"unified_memory_pool_bytes": 1 << 19, "max_total_num_tokens": 0})()
    pool.finalize_backing(config)
    assert bound.active_allocation_bytes == 1 << 19
    conv, temporal = pool.mamba_views_for("mamba")
    for view in (*conv, temporal):
        last = bound.num_pages("mamba") - 1
        view[:, last].fill_(1)
    tokens = allocator.alloc(allocator.available_size())
    allocator.free(tokens)


def test_every_sub_pool_reports_what_is_backed(rig: Any) -> None:
    """MLA and Mamba sub-pools, for which stock reports the whole reservation."""
    if not rig.release.hardened:
        pytest.skip("only hybrid-SWA pools are backed late before 0.5.22")
    from sglang.test import unified_allocator_fixtures as fixtures

    pool = rig.release.pools.UnifiedKVPool(
        total_bytes=1 << 20,
        sub_pool_specs=fixtures.tri_sub_pool_specs(),
        device="cpu",
        enable_memory_saver=False,
        page_size=4,
        post_capture_active=True,
    )
    (bound,) = runtime.pools
    kinds = rig.release.pools.UnifiedMambaPool, rig.release.pools.UnifiedMLATokenToKVPool
    for kind in kinds:
        part = object.__new__(kind)
        part._unified_buffer, part._sub_pool_name, part._page_bytes = pool, "mamba", 64
        ptrs, lens, items = part.get_contiguous_buf_infos()
        assert ptrs == [bound.arena.base]
        assert lens == [bound.sink_bytes]
        assert items[0] > 0
