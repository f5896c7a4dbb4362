"""Everything here needs a CUDA device."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kvarena.pool.testing.arena_contract",
    "kvarena.pool.testing.arena_fault_contract",
    "kvarena.pool.testing.allocator_samples",
    "kvarena.pool.testing.device_contract",
    "kvarena.pool.testing.driver_contract",
    "kvarena.pool.testing.pool_contract",
    "kvarena.pool.testing.pool_fault_contract",
)


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
