"""What only a GPU has: other devices, torch's cache, contexts that a fault kills.

What the host driver can run as well is in `kvarena.pool.testing.device_contract`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from kvarena.pool import Arena, CudaVmm, DriverUnavailableError

pytestmark = pytest.mark.gpu


@pytest.fixture
def driver() -> CudaVmm:
    return CudaVmm(0)


def test_the_device_says_what_it_can(driver: CudaVmm) -> None:
    assert driver.name == "cuda"
    assert driver.device == torch.device("cuda", 0)
    assert driver.granularity >= 1 << 20
    assert driver.granularity & (driver.granularity - 1) == 0
    assert isinstance(driver.rdma_capable, bool)
    assert isinstance(driver.fabric_capable, bool)


def test_devices_that_are_not_there_are_refused() -> None:
    for device in (torch.cuda.device_count(), "cpu"):
        with pytest.raises(DriverUnavailableError):
            CudaVmm(device)


def test_blocks_that_torch_caches_are_counted_as_free(driver: CudaVmm) -> None:
    before = driver.free_bytes()
    torch.empty(4 << 30, dtype=torch.uint8, device=driver.device)
    assert torch.cuda.memory_reserved(driver.device) >= 4 << 30
    assert before - driver.free_bytes() < 2 * driver.granularity
    assert driver.cached_bytes_released >= 4 << 30


def test_backing_takes_what_torch_caches(driver: CudaVmm) -> None:
    maximum = driver.free_bytes()
    with Arena(driver, maximum) as arena:
        torch.empty(4 << 30, dtype=torch.uint8, device=driver.device)
        arena.back(maximum)
        assert arena.backed_bytes == maximum
    assert driver.cached_bytes_released >= 4 << 30


def test_another_device_context_is_left_current(driver: CudaVmm) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    torch.cuda.set_device(1)
    try:
        with Arena(driver, 8 * driver.granularity) as arena:
            arena.back(driver.granularity)
            arena.tensor[:16] = 1
        assert torch.cuda.current_device() == 1
        assert torch.ones(1, device="cuda").device.index == 1
    finally:
        torch.cuda.set_device(0)


def test_bytes_without_memory_fault() -> None:
    code = """
import torch
from kvarena.pool import Arena, CudaVmm
driver = CudaVmm(0)
arena = Arena(driver, 64 * driver.granularity)
arena.back(driver.granularity)
tensor = arena.tensor
tensor[driver.granularity - 1] = 1
torch.cuda.synchronize()
try:
    # A kernel's access; a plain fill is a memset, which the driver refuses as an invalid argument.
    tensor[driver.granularity:][:4096].add_(1)
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "illegal" in str(error), error
    try:
        arena.close()
    except Exception as error:
        assert type(error).__name__ == "DriverError", error
    raise SystemExit(42)
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert child.returncode == 42, child.stderr
