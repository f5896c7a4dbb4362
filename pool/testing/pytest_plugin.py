"""Fixtures of arenas and pools, for whoever tests a transfer engine or a driver: a pytest plugin.

Installed with kvarena (entry point ``pytest11``); nothing here imports torch until a fixture is used.
All are on host memory, whose handles travel between processes as CUDA's do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvarena.pool import Arena, HostVmm, UnifiedKVPool
    from kvarena.pool.layout import GrowDirection

__all__ = ["kvarena_arena", "kvarena_driver", "kvarena_pool", "kvarena_reserved_pool"]

ARENA_BYTES = 8 << 20
POOL_BYTES = 4 << 20
PAGE_SIZE = 4


@pytest.fixture
def kvarena_driver() -> HostVmm:
    """A host driver with CUDA's granularity of 2 MiB and 64 MiB to give."""
    from kvarena.pool import HostVmm

    return HostVmm(memory_limit=64 << 20, granularity=2 << 20)


@pytest.fixture
def kvarena_arena(kvarena_driver: HostVmm) -> Iterator[Arena]:
    """An arena of 8 MiB with its first 4 backed by two handles, so that it has a seam; closed afterwards.

    Fails the test that leaves memory behind.
    """
    from kvarena.pool import Arena

    free = kvarena_driver.free_bytes()
    with Arena(kvarena_driver, ARENA_BYTES) as arena:
        arena.back(ARENA_BYTES // 4)
        arena.grow(ARENA_BYTES // 2)
        yield arena
    assert kvarena_driver.free_bytes() == free, "memory of the arena was not given back"


@pytest.fixture
def kvarena_reserved_pool(kvarena_driver: HostVmm) -> Iterator[UnifiedKVPool]:
    """A hybrid pool (``full`` and ``swa``, pages of 4 tokens) before capture: only its sink is backed."""
    import torch
    from kvarena.pool import MHASubPoolSpec, UnifiedKVPool

    def spec(name: str, grow_direction: GrowDirection, layers: int) -> MHASubPoolSpec:
        return MHASubPoolSpec(name, grow_direction, layers, head_num=2, head_dim=32, dtype=torch.float32)

    free = kvarena_driver.free_bytes()
    pool = UnifiedKVPool(
        total_bytes=2 * POOL_BYTES,
        sub_pool_specs=[spec("full", "up", 2), spec("swa", "down", 3)],
        driver=kvarena_driver,
        page_size=PAGE_SIZE,
        post_capture_active=True,
    )
    yield pool
    pool.close()
    assert kvarena_driver.free_bytes() == free, "memory of the pool was not given back"


@pytest.fixture
def kvarena_pool(kvarena_reserved_pool: UnifiedKVPool) -> UnifiedKVPool:
    """The same pool after finalize, with 4 MiB in one handle."""
    from kvarena.pool import resize_for

    kvarena_reserved_pool.finalize_backing(resize_for(kvarena_reserved_pool, POOL_BYTES))
    return kvarena_reserved_pool
