"""Everything here needs a CUDA device."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kvarena.pool.testing.allocator_contract",
    "kvarena.pool.testing.allocator_ids_contract",
    "kvarena.pool.testing.allocator_samples",
    "kvarena.pool.testing.resize_contract",
)


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
