from __future__ import annotations

from kvarena.pool.pool_contract import PoolContract


class TestPool(PoolContract):
    expression = "kvarena.pool.HostVmm(memory_limit=4 << 20)"


class TestPoolWithLargeGranules(PoolContract):
    expression = "kvarena.pool.HostVmm(memory_limit=200 << 20, granularity=2 << 20)"
