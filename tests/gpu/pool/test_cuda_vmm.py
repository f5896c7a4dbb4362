"""What only a GPU has: captured graphs, torch's cache, contexts that a fault kills."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from kvarena.pool import (
    Arena,
    CudaVmm,
    DriverError,
    DriverUnavailableError,
    MHASubPoolSpec,
    UnifiedKVPool,
)

pytestmark = pytest.mark.gpu

SPECS = (
    MHASubPoolSpec("full", "up", 4, 4, 64, torch.bfloat16),
    MHASubPoolSpec("swa", "down", 4, 4, 64, torch.bfloat16),
)


@pytest.fixture
def driver() -> CudaVmm:
    return CudaVmm(0)


def make_pool(driver: CudaVmm, total_bytes: int) -> UnifiedKVPool:
    return UnifiedKVPool(
        total_bytes=total_bytes, sub_pool_specs=SPECS, driver=driver, page_size=16, post_capture_active=True
    )


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


def test_a_graph_captured_on_the_sink_replays_into_the_final_memory(driver: CudaVmm) -> None:
    pool = make_pool(driver, 1 << 30)
    keys = pool.k_view("full", 2)
    page = torch.zeros(1, dtype=torch.int64, device=driver.device)
    new = torch.ones(1, 16, 4, 64, dtype=torch.bfloat16, device=driver.device)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # warm up beside the default stream, as capture wants it
        keys.index_copy_(0, page, new)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keys.index_copy_(0, page, new)
    graph.replay()
    pool.finalize_backing(SimpleNamespace(unified_memory_pool_bytes=512 << 20))
    assert float(keys[:100].max()) == 0
    last = pool.num_pages("full") - 1
    for value, where in ((2.0, 0), (3.0, last)):
        new.fill_(value)
        page.fill_(where)
        graph.replay()
        assert bool((keys[where] == value).all())
    pool.close()


def test_finalize_waits_for_work_on_the_sink(driver: CudaVmm) -> None:
    pool = make_pool(driver, 1 << 30)
    sink = pool.raw[: pool.sink_bytes]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        # Cycles: about a tenth of a second.
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        sink.fill_(9)
    pool.finalize_backing(SimpleNamespace(unified_memory_pool_bytes=256 << 20))
    torch.cuda.synchronize()
    assert int(sink.max()) == 0
    pool.close()


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


def test_lives_of_gigabytes_leave_no_memory_taken(driver: CudaVmm) -> None:
    before = driver.free_bytes()
    for _ in range(20):
        pool = make_pool(driver, 16 << 30)
        pool.finalize_backing(SimpleNamespace(unified_memory_pool_bytes=4 << 30))
        pool.grow(8 << 30)
        pool.close()
    assert before - driver.free_bytes() < 256 << 20


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


def test_errors_name_the_call_and_its_code(driver: CudaVmm) -> None:
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        driver.unmap(driver.granularity, driver.granularity)
    assert caught.value.op == "cuMemUnmap"
