"""The allocators over CUDA's memory: the same classes as over the host's (tests/pool/allocators)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from kvarena.pool.testing.allocator_contract import AllocatorContract
from kvarena.pool.testing.allocator_ids_contract import AllocatorIdsContract
from kvarena.pool.testing.allocator_machine import AllocatorMachine
from kvarena.pool.testing.resize_contract import ResizeContract

pytestmark = pytest.mark.gpu


class TestAllocators(AllocatorContract):
    expression = "kvarena.pool.CudaVmm(0)"


class TestIds(AllocatorIdsContract):
    expression = "kvarena.pool.CudaVmm(0)"


class TestResize(ResizeContract):
    expression = "kvarena.pool.CudaVmm(0)"


class CudaMachine(AllocatorMachine):
    expression = "kvarena.pool.CudaVmm(0)"


@pytest.mark.usefixtures("_device")
class TestCudaMachine(CudaMachine.TestCase):  # type: ignore[misc]
    settings = settings(
        max_examples=20,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
