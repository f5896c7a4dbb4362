"""Everything here needs a CUDA device."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kvarena.pool.allocator_contract", "kvarena.pool.allocator_samples", "kvarena.pool.resize_contract"
)


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
