"""The same-host engine keeps the contract of every engine on a GPU, over two real processes."""

from __future__ import annotations

import pytest
from kvarena.transfer.testing import TransferEngineContract
from same_host_gpu_support import CudaMemory, MakeEngine

pytestmark = pytest.mark.gpu


class TestSameHostEngineOnCuda(TransferEngineContract):
    engine_factory = MakeEngine()
    memory_factory = CudaMemory
    leak_allowance = (8, 64, 4)
