"""The built-in budget, whose limits hold for what is backed, not only for what is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvarena.hooks import BudgetRequest
from kvarena.hooks.defaults import DefaultBudget
from kvarena.pool import HostVmm, MHASubPoolSpec, UnifiedKVPool, resize_for

GRANULE = 2 << 20


@pytest.fixture
def pool() -> Iterator[UnifiedKVPool]:
    pool = UnifiedKVPool(
        total_bytes=16 * GRANULE + 5,
        sub_pool_specs=[
            MHASubPoolSpec("full", "up", 2, 2, 32, torch.float32),
            MHASubPoolSpec("swa", "down", 3, 2, 32, torch.float32),
        ],
        driver=HostVmm(memory_limit=16 * GRANULE, granularity=GRANULE),
        post_capture_active=True,
    )
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("max_bytes", "headroom"),
    [(3 * GRANULE, 0), (3 * GRANULE - 1, 0), (2 * GRANULE + 1, 0), (None, GRANULE + 1), (10 * GRANULE, 7)],
)
def test_a_backed_pool_keeps_within_the_operators_limits(
    pool: UnifiedKVPool, max_bytes: int | None, headroom: int
) -> None:
    """KVARENA_POOL_BYTES was exceeded by up to a granule, for whole granules are backed."""
    request = BudgetRequest(pool, pool.driver, headroom_bytes=headroom, max_bytes=max_bytes)
    nbytes = DefaultBudget().kvarena_budget(request)
    pool.finalize_backing(resize_for(pool, nbytes))
    assert max_bytes is None or max_bytes - GRANULE < pool.post_capture_backed_bytes <= max_bytes
    assert pool.driver.free_bytes() >= headroom


def test_a_limit_below_a_granule_leaves_nothing(pool: UnifiedKVPool) -> None:
    for request in (
        BudgetRequest(pool, pool.driver, max_bytes=GRANULE - 1),
        BudgetRequest(pool, pool.driver, headroom_bytes=32 * GRANULE),
    ):
        assert DefaultBudget().kvarena_budget(request) == 0


def test_a_reservation_between_granules_is_given_whole() -> None:
    pool = UnifiedKVPool(
        total_bytes=2 * GRANULE + 5,
        sub_pool_specs=[MHASubPoolSpec("full", "up", 2, 2, 32, torch.float32)],
        driver=HostVmm(memory_limit=16 * GRANULE, granularity=GRANULE),
        post_capture_active=True,
    )
    assert DefaultBudget().kvarena_budget(BudgetRequest(pool, pool.driver)) == 2 * GRANULE + 5
    pool.close()
