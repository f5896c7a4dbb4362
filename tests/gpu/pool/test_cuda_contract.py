from __future__ import annotations

import pytest
from kvarena.pool.testing.arena_contract import ArenaContract
from kvarena.pool.testing.arena_fault_contract import ArenaFaultContract
from kvarena.pool.testing.device_contract import DeviceContract
from kvarena.pool.testing.driver_contract import DriverContract
from kvarena.pool.testing.pool_contract import PoolContract
from kvarena.pool.testing.pool_fault_contract import PoolFaultContract

pytestmark = pytest.mark.gpu


class TestDriver(DriverContract):
    expression = "kvarena.pool.CudaVmm(0)"


class TestArena(ArenaContract, ArenaFaultContract):
    expression = "kvarena.pool.CudaVmm(0)"


class TestPool(PoolContract):
    expression = "kvarena.pool.CudaVmm(0)"


class TestPoolFaults(PoolFaultContract):
    expression = "kvarena.pool.CudaVmm(0)"


class TestDeviceWork(DeviceContract):
    expression = "kvarena.pool.CudaVmm(0)"
