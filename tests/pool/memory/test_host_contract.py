from __future__ import annotations

from kvarena.pool.testing.arena_contract import ArenaContract
from kvarena.pool.testing.arena_fault_contract import ArenaFaultContract
from kvarena.pool.testing.device_contract import DeviceContract
from kvarena.pool.testing.driver_contract import DriverContract

LIMITED = "kvarena.pool.HostVmm(memory_limit=8 << 20)"
AS_CUDA = "kvarena.pool.HostVmm(memory_limit=256 << 20, granularity=2 << 20)"


class TestDriver(DriverContract):
    expression = LIMITED


class TestDriverWithLargeGranules(DriverContract):
    expression = AS_CUDA
    # Once is enough: the child imports torch.
    test_a_handle_travels_to_another_process = None  # type: ignore[assignment]


class TestArena(ArenaContract, ArenaFaultContract):
    expression = LIMITED


class TestArenaWithLargeGranules(ArenaContract, ArenaFaultContract):
    expression = AS_CUDA


class TestDeviceWork(DeviceContract):
    expression = AS_CUDA
