"""Everything here needs a CUDA device; the support modules are those of tests/transfer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "transfer" / "support"))


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
