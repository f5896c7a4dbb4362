from __future__ import annotations

from kvarena.pool.testing.allocator_contract import AllocatorContract
from kvarena.pool.testing.allocator_ids_contract import AllocatorIdsContract
from kvarena.pool.testing.resize_contract import ResizeContract

LIMITED = "kvarena.pool.HostVmm(memory_limit=8 << 20)"


class TestAllocators(AllocatorContract):
    expression = LIMITED


class TestIds(AllocatorIdsContract):
    expression = LIMITED


class TestResize(ResizeContract):
    expression = LIMITED
