"""What a `UnifiedKVPool` must do on any driver, as a pytest class to derive from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kvarena.pool.errors import ArenaStateError, LayoutError, PoolSizeError, PoolStateError
from kvarena.pool.layout import MambaSubPoolSpec, MHASubPoolSpec, MLASubPoolSpec, SubPoolSpec
from kvarena.pool.testing import FailingDriver, make_driver, no_leaks
from kvarena.pool.unified_kv_pool import UnifiedKVPool

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["PoolContract", "PoolFixtures", "addresses_of", "exposed_capacities", "sized"]

FULL = MHASubPoolSpec("full", "up", 2, 2, 16, torch.bfloat16)
SWA = MHASubPoolSpec("swa", "down", 3, 2, 16, torch.bfloat16, v_head_dim=8)
MAMBA = MambaSubPoolSpec("mamba", "float", 2, ((6, 3),), (2, 4, 4), torch.bfloat16)
MLA = MLASubPoolSpec("mla", "float", 2, 16, 8, torch.bfloat16)


def exposed_capacities(pool: UnifiedKVPool) -> dict[str, Any]:
    """Everything about a pool that depends on its size; equal for a finalized and an eager pool."""
    infos = pool.get_contiguous_buf_infos()
    found: dict[str, Any] = {
        "total_bytes": pool.total_bytes,
        "active_allocation_bytes": pool.active_allocation_bytes,
        "post_capture_backed_bytes": pool.post_capture_backed_bytes,
        "finalized": pool.finalized,
        "sink_bytes": pool.sink_bytes,
        "handles": [(mapping.offset, mapping.nbytes) for mapping in pool.arena.mappings],
        "bases": {ptr - pool.arena.base for ptr in infos.ptrs},
        "lens": infos.lens,
        "item_lens": infos.item_lens,
    }
    for name in (spec.name for spec in pool.sub_pool_specs):
        for what in ("num_pages", "max_slots", "min_page_index", "min_slot_index", "page_bytes"):
            found[f"{name}.{what}"] = getattr(pool, what)(name)
        one = pool.get_contiguous_buf_infos(name)
        found[f"{name}.infos"] = (one.lens, one.item_lens)
    return found


class PoolFixtures:
    """What both contracts of the pool stand on."""

    expression: str
    """How to make the driver: a dotted name and a call."""

    @pytest.fixture
    def driver(self) -> Iterator[FailingDriver]:
        """A driver that fails when told to; nothing may be left of what was made on it."""
        driver = FailingDriver(make_driver(self.expression))
        self.make(driver).close()
        free = driver.free_bytes()
        with no_leaks():
            yield driver
            driver.fail_at = None
        assert driver.outstanding() == []
        # A GPU also loads kernels into its memory when they first run.
        assert free - driver.free_bytes() <= (0 if driver.name == "host" else 256 << 20)

    @pytest.fixture
    def pool(self, driver: FailingDriver) -> Iterator[UnifiedKVPool]:
        """A reserved pool, with its views' first page written."""
        pool = self.make(driver)
        pool.k_view("full", 1)[0] = 3
        yield pool
        pool.close()

    @staticmethod
    def make(
        driver: Driver,
        *,
        granules: int = 40,
        extra: int = 777,
        active: bool = True,
        specs: tuple[SubPoolSpec, ...] = (SWA, FULL),
        page_size: int = 4,
    ) -> UnifiedKVPool:
        """A pool of `granules` and `extra` bytes."""
        return UnifiedKVPool(
            total_bytes=granules * driver.granularity + extra,
            sub_pool_specs=specs,
            driver=driver,
            page_size=page_size,
            post_capture_active=active,
            bs1_floor_terms=[("full", 9), ("swa", 5)],
        )


class PoolContract(PoolFixtures):
    """Tests of the pool that hold for every driver: the plan of the change that began it, and more."""

    def test_only_the_sink_is_backed_before_capture(self, driver: Driver, pool: UnifiedKVPool) -> None:
        assert [spec.name for spec in pool.sub_pool_specs] == ["full", "swa"]
        assert pool.sink_bytes == max(pool.page_bytes("full"), pool.page_bytes("swa")) == 4 * 3 * 2 * 24 * 2
        assert pool.post_capture_backed_bytes == driver.granularity
        assert (pool.finalized, pool.post_capture_active) == (False, True)
        infos = pool.get_contiguous_buf_infos()
        assert infos.ptrs == [pool.arena.base] * 2
        assert infos.lens == [pool.sink_bytes] * 2
        assert infos.item_lens == [pool.page_bytes("full"), pool.page_bytes("swa")]
        assert pool.raw.numel() == pool.total_bytes == pool.reserved_bytes
        for name in ("full", "swa"):
            assert pool.page_address(name, 0) == pool.raw.data_ptr()
            assert (pool.min_page_index(name) - 1) * pool.page_bytes(name) < pool.sink_bytes
            assert pool.min_page_index(name) * pool.page_bytes(name) >= pool.sink_bytes

    def test_a_finalized_pool_equals_an_eager_one(self, driver: Driver, pool: UnifiedKVPool) -> None:
        final = 17 * driver.granularity + 333
        pool.finalize_backing(sized(final))
        eager = self.make(driver, granules=17, extra=333, active=False)
        assert exposed_capacities(pool) == exposed_capacities(eager)
        assert pool.active_allocation_bytes == final
        eager.close()

    def test_addresses_never_move(self, driver: Driver, pool: UnifiedKVPool) -> None:
        size = driver.granularity
        before = addresses_of(pool)
        pool.finalize_backing(sized(17 * size))
        assert addresses_of(pool) == before
        pool.grow(20 * size)
        assert addresses_of(pool) == before
        pool.shrink(17 * size)
        pool.revert_finalize()
        assert addresses_of(pool) == before

    def test_the_whole_span_is_zero_and_writable(self, driver: Driver, pool: UnifiedKVPool) -> None:
        final = 17 * driver.granularity + 333
        pool.finalize_backing(sized(final))
        assert int(pool.raw[: pool.post_capture_backed_bytes].max()) == 0
        for name in ("full", "swa"):
            pages = pool.num_pages(name)
            views = [pool.view(name, layer, part) for layer in (0, 1) for part in ("k", "v")]
            for value, view in enumerate(views, 1):
                view[:pages] = value
            for value, view in enumerate(views, 1):
                assert bool((view[:pages] == value).all())
        pool.raw[:final] = 255
        assert int(pool.raw[:final].min()) == 255

    def test_views_lie_where_the_layout_says(self, pool: UnifiedKVPool) -> None:
        view = pool.v_view("swa", 2)
        assert view.shape == (pool.reserved_num_pages("swa"), 4, 2, 8)
        # Layer 2 follows two layers of 4 tokens × 2 heads × 24 bf16; its keys are 4 × 2 × 16.
        offset = 2 * 4 * 2 * 24 * 2 + 4 * 2 * 16 * 2
        assert view[1].data_ptr() == pool.page_address("swa", 1) + offset
        assert view[0].is_contiguous()
        assert pool.v_view("swa", 2) is view
        pool.k_view("full", 0)[0, 3, 1, 15] = 1
        raw = pool.raw[: pool.sink_bytes].view(torch.bfloat16)
        assert float(raw[(3 * 2 + 1) * 16 + 15]) == 1

    def test_bad_sizes_are_refused_and_change_nothing(self, driver: Driver, pool: UnifiedKVPool) -> None:
        before = exposed_capacities(pool)
        maximum, minimum = pool.reserved_bytes, pool.floor_bytes
        for config in (SimpleNamespace(), sized(None), sized(1.5 * minimum), sized(True), None):
            with pytest.raises(PoolSizeError, match=r"missing.*unified_memory_pool_bytes") as caught:
                pool.finalize_backing(config)
            assert (caught.value.requested, caught.value.minimum, caught.value.maximum) == (
                None,
                minimum,
                maximum,
            )
        for size in (maximum + 1, 1 << 62):
            with pytest.raises(PoolSizeError, match=f"{size}.*more than the {maximum}") as caught:
                pool.finalize_backing(sized(size))
            assert (caught.value.requested, caught.value.maximum) == (size, maximum)
        for size in (minimum - 1, 0, -1):
            with pytest.raises(PoolSizeError, match=f"{size}.*one request needs {minimum}") as caught:
                pool.finalize_backing(sized(size))
            assert (caught.value.requested, caught.value.minimum) == (size, minimum)
        assert exposed_capacities(pool) == before
        assert float(pool.k_view("full", 1)[0].min()) == 3
        pool.finalize_backing(sized(minimum))
        assert pool.total_bytes == minimum

    def test_the_floor_is_exactly_one_request(self, driver: Driver) -> None:
        for page_size in (1, 3, 4):
            pool = self.make(driver, page_size=page_size)
            full, swa = -(-9 // page_size), -(-5 // page_size)

            def fits(total: int, pool: UnifiedKVPool = pool, full: int = full, swa: int = swa) -> bool:
                top = (pool.min_page_index("full") + full) * pool.page_bytes("full")
                first = total // pool.page_bytes("swa") - swa
                return first >= pool.min_page_index("swa") and first * pool.page_bytes("swa") >= top

            assert fits(pool.floor_bytes)
            assert not fits(pool.floor_bytes - 1)
            pool.close()

    def test_an_eager_pool_has_its_size_for_good(self, driver: Driver) -> None:
        pool = self.make(driver, active=False)
        before = exposed_capacities(pool)
        size = pool.floor_bytes + 1
        steps: list[Callable[[], None]] = [
            lambda: pool.finalize_backing(sized(size)),
            lambda: pool.grow(size),
            lambda: pool.shrink(size),
            pool.revert_finalize,
        ]
        for step in steps:
            with pytest.raises(PoolStateError, match=r"[Ee]ager.*post_capture_active"):
                step()
        assert exposed_capacities(pool) == before
        pool.close()

    def test_steps_out_of_order_are_refused(self, driver: Driver, pool: UnifiedKVPool) -> None:
        size = driver.granularity
        steps: list[Callable[[], None]] = [
            lambda: pool.grow(20 * size),
            lambda: pool.shrink(10 * size),
            pool.revert_finalize,
        ]
        before = exposed_capacities(pool)
        for step in steps:
            with pytest.raises(PoolStateError, match=r"not final yet.*finalize_backing"):
                step()
        assert exposed_capacities(pool) == before
        pool.finalize_backing(sized(17 * size))
        with pytest.raises(PoolStateError, match=r"final already.*grow"):
            pool.finalize_backing(sized(18 * size))
        pool.close()
        for step in [*steps, lambda: pool.finalize_backing(sized(size))]:
            with pytest.raises(PoolStateError, match="closed"):
                step()

    def test_growth_and_shrinking_keep_contents(self, driver: Driver, pool: UnifiedKVPool) -> None:
        size = driver.granularity
        pool.finalize_backing(sized(10 * size + 5))
        pool.raw[: 10 * size + 5] = 6
        small = exposed_capacities(pool)
        pool.grow(15 * size + 1)
        assert pool.arena.seams == (pool.arena.base + 11 * size,)
        assert pool.get_contiguous_buf_infos().lens == [15 * size + 1] * 2
        assert int(pool.raw[11 * size : 16 * size].max()) == 0
        with pytest.raises(ArenaStateError, match=str(11 * size)):
            pool.shrink(13 * size)
        for wrong in (pool.total_bytes, pool.total_bytes - 1):
            with pytest.raises(PoolSizeError, match="grow"):
                pool.grow(wrong)
        for wrong in (pool.total_bytes, pool.total_bytes + 1):
            with pytest.raises(PoolSizeError, match="shrink"):
                pool.shrink(wrong)
        with pytest.raises(PoolSizeError, match="reserved"):
            pool.grow(pool.reserved_bytes + 1)
        with pytest.raises(PoolSizeError, match="one request"):
            pool.shrink(pool.floor_bytes - 1)
        assert pool.total_bytes == 15 * size + 1
        pool.shrink(10 * size + 5)
        assert exposed_capacities(pool) == small
        assert int(pool.raw[: 10 * size + 5].min()) == 6

    def test_a_shrink_can_be_taken_back_with_its_handles(self, driver: Driver, pool: UnifiedKVPool) -> None:
        """Undone by `grow`, sizes to which the pool could shrink before were refused."""
        size = driver.granularity
        with pytest.raises(PoolStateError, match="not final yet"):
            pool.revert_shrink()
        pool.finalize_backing(sized(10 * size))
        for granules in (13, 15):
            pool.grow(granules * size + 5)
        pool.raw[: 15 * size + 5] = 6
        before, addresses = exposed_capacities(pool), addresses_of(pool)
        with pytest.raises(PoolStateError, match="nothing to take back"):
            pool.revert_shrink()
        pool.shrink(10 * size)
        pool.revert_shrink()
        assert exposed_capacities(pool) == before
        assert addresses_of(pool) == addresses
        assert int(pool.raw[: 10 * size].min()) == 6
        assert int(pool.raw[10 * size : 15 * size + 5].max()) == 0
        with pytest.raises(PoolStateError, match="nothing to take back"):
            pool.revert_shrink()
        pool.shrink(13 * size + 5)
        pool.shrink(13 * size + 1)  # within a granule: no handle goes
        pool.revert_shrink()
        assert pool.total_bytes == 13 * size + 5
        pool.shrink(10 * size)
        pool.grow(11 * size)
        with pytest.raises(PoolStateError, match="nothing to take back"):
            pool.revert_shrink()

    def test_growth_within_a_granule_takes_no_handle(self, driver: Driver, pool: UnifiedKVPool) -> None:
        size = driver.granularity
        pool.finalize_backing(sized(10 * size + 5))
        mappings = pool.arena.mappings
        pool.grow(11 * size)
        assert pool.arena.mappings == mappings
        assert pool.total_bytes == 11 * size
        pool.shrink(10 * size + 5)
        assert (pool.arena.mappings, pool.total_bytes) == (mappings, 10 * size + 5)

    def test_every_kind_reports_only_backed_bytes(self, driver: Driver) -> None:
        pool = self.make(driver, specs=(MLA, SWA, MAMBA, FULL))
        assert [spec.name for spec in pool.sub_pool_specs] == ["full", "mla", "mamba", "swa"]
        for _ in range(2):
            for name in ("full", "mla", "mamba", "swa"):
                infos = pool.get_contiguous_buf_infos(name)
                assert infos == ([pool.arena.base], [pool.active_allocation_bytes], [pool.page_bytes(name)])
            assert pool.active_allocation_bytes <= pool.post_capture_backed_bytes
            if not pool.finalized:
                pool.finalize_backing(sized(9 * driver.granularity + 1))
        assert pool.slots_per_page("mamba") == 1
        assert pool.max_slots("mamba") == pool.total_bytes // MAMBA.entry_bytes()
        state = pool.view("mamba", 1, "temporal")[: pool.num_pages("mamba")]
        state.fill_(2.5)
        assert float(state.min()) == 2.5
        latent = pool.k_view("mla", 1)[: pool.num_pages("mla")]
        latent.fill_(1)
        assert pool.v_view("mla", 1).shape[-2:] == (1, 16)
        assert float(pool.v_view("mla", 1)[: pool.num_pages("mla")].min()) == 1
        with pytest.raises(LayoutError, match=r"mamba.*conv0.*temporal"):
            pool.k_view("mamba", 0)
        pool.close()


def sized(total_bytes: object) -> SimpleNamespace:
    """What `finalize_backing` takes."""
    return SimpleNamespace(unified_memory_pool_bytes=total_bytes)


def addresses_of(pool: UnifiedKVPool) -> dict[str, tuple[int, int]]:
    """The identity and address of the raw tensor and of every view."""
    found = {"raw": (id(pool.raw), pool.raw.data_ptr())}
    for spec in pool.sub_pool_specs:
        for layer in range(spec.layer_num):
            for part in spec.layer_parts(layer, pool.page_size):
                view = pool.view(spec.name, layer, part.name)
                found[f"{spec.name}.{layer}.{part.name}"] = (id(view), view.data_ptr())
    return found
