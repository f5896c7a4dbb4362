"""What a `UnifiedKVPool` must do when its driver fails, as a pytest class to derive from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvarena.errors import KvArenaError
from kvarena.pool.arena import ArenaState
from kvarena.pool.errors import DescriptorLimitError, DriverError, OutOfMemoryError
from kvarena.pool.testing import FailingDriver, no_leaks
from kvarena.pool.testing.pool_contract import PoolFixtures, addresses_of, exposed_capacities, sized
from kvarena.pool.unified_kv_pool import UnifiedKVPool

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["PoolFaultContract"]


class PoolFaultContract(PoolFixtures):
    """Out of memory, and failures at every call: the pool is as before or as after, and nothing leaks."""

    def test_out_of_memory_at_finalize_can_be_tried_with_less(self, driver: Driver) -> None:
        size = driver.granularity
        pool = self.make(driver, granules=driver.free_bytes() // size + 1024)
        pool.k_view("full", 1)[0] = 3
        before = exposed_capacities(pool)
        with pytest.raises(OutOfMemoryError, match="free"):
            pool.finalize_backing(sized(pool.reserved_bytes))
        assert exposed_capacities(pool) == before
        assert float(pool.k_view("full", 1)[0].min()) == 3
        pool.finalize_backing(sized(8 * size))
        assert pool.total_bytes == 8 * size
        pool.close()

    def test_finalize_can_be_reverted_even_without_free_memory(self, driver: Driver) -> None:
        size = driver.granularity
        pool = self.make(driver, granules=driver.free_bytes() // size)
        before = exposed_capacities(pool)
        pool.finalize_backing(sized(driver.free_bytes()))
        if free := driver.free_bytes() // size * size:
            pool.grow(pool.post_capture_backed_bytes + free)
        pool.revert_finalize()
        assert exposed_capacities(pool) == before
        assert int(pool.raw[: pool.sink_bytes].max()) == 0
        pool.finalize_backing(sized(8 * size))
        pool.close()

    def test_finalize_can_be_reverted_even_without_a_free_descriptor(self, driver: FailingDriver) -> None:
        pool = self.make(driver)
        before = exposed_capacities(pool)
        pool.finalize_backing(sized(8 * driver.granularity))
        driver._ops, driver._error = frozenset({"create"}), DescriptorLimitError("memfd_create")
        driver.fail_at = 1
        pool.revert_finalize()
        assert driver.counted == 2  # the sink's handle was made once the pool's was gone
        assert exposed_capacities(pool) == before
        pool.close()

    @pytest.mark.parametrize("active", [False, True])
    def test_a_failure_at_any_call_of_the_constructor_leaves_nothing(
        self, driver: FailingDriver, active: bool
    ) -> None:
        number = 0
        pool = None
        while pool is None:
            number += 1
            driver.fail_at = number
            with no_leaks():
                try:
                    pool = self.make(driver, active=active)
                except DriverError:
                    continue
                driver.fail_at = None
                pool.close()
        assert number == 6  # reserve, create, map, zero, tensor, and the one that did not fail

    @pytest.mark.parametrize("step", ["finalize", "grow", "shrink", "revert shrink", "revert"])
    def test_a_failure_at_any_call_leaves_before_or_after(self, driver: FailingDriver, step: str) -> None:
        size = driver.granularity
        steps: dict[str, Callable[[UnifiedKVPool], None]] = {
            "finalize": lambda pool: pool.finalize_backing(sized(9 * size + 7)),
            "grow": lambda pool: pool.grow(12 * size),
            "shrink": lambda pool: pool.shrink(5 * size),
            "revert shrink": lambda pool: pool.revert_shrink(),
            "revert": lambda pool: pool.revert_finalize(),
        }
        failed = True
        number = 0
        while failed:
            number += 1
            pool = self.make(driver)
            if step != "finalize":
                pool.finalize_backing(sized(5 * size))
                pool.grow(8 * size)
                pool.grow(10 * size)
            if step == "revert shrink":
                pool.shrink(5 * size)
            pool.raw[: pool.active_allocation_bytes] = 4
            before, addresses = exposed_capacities(pool), addresses_of(pool)
            driver.fail_at = number
            try:
                steps[step](pool)
            except KvArenaError:
                assert exposed_capacities(pool) == before
                assert int(pool.raw[: pool.active_allocation_bytes].min()) == 4
            else:
                assert exposed_capacities(pool) != before
            failed = driver.counted >= number
            driver.fail_at = None
            assert addresses_of(pool) == addresses
            steps[step](pool) if exposed_capacities(pool) == before else None
            assert pool.active_allocation_bytes <= pool.post_capture_backed_bytes
            pool.close()
            assert pool.arena.state is ArenaState.CLOSED
        assert number > 2

    def test_many_lives_leave_nothing(self, driver: Driver) -> None:
        for _ in range(10):
            pool = self.make(driver)
            pool.finalize_backing(sized(9 * driver.granularity))
            pool.grow(20 * driver.granularity)
            pool.raw[: pool.total_bytes] = 1
            pool.close()
            pool.close()
