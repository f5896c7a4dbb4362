from __future__ import annotations

from kvarena.pool.testing.pool_contract import PoolContract
from kvarena.pool.testing.pool_fault_contract import PoolFaultContract

SMALL = "kvarena.pool.HostVmm(memory_limit=4 << 20)"
AS_CUDA = "kvarena.pool.HostVmm(memory_limit=200 << 20, granularity=2 << 20)"


class TestPool(PoolContract):
    expression = SMALL


class TestPoolWithLargeGranules(PoolContract):
    expression = AS_CUDA


class TestFaults(PoolFaultContract):
    expression = SMALL


class TestFaultsWithLargeGranules(PoolFaultContract):
    expression = AS_CUDA
