"""Everything here needs a CUDA device, Triton, and a second process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Spawned processes take our sys.path, and so find the support module by its name.
sys.path.insert(0, str(Path(__file__).parent))

MIB = 1 << 20


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    pytest.importorskip("triton")


@pytest.fixture(scope="module")
def processes() -> Iterator[list[object]]:
    """Processes for receivers."""
    from kvarena.transfer.testing import PeerProcess

    started: list[object] = []
    yield started
    for process in started:
        assert isinstance(process, PeerProcess)
        process.close()


def make_pair(processes: list[object], where: str) -> Iterator[tuple[object, object]]:
    """A sender here and a receiver in another process; 64 MiB backed and registered on each side."""
    import torch
    from kvarena.transfer.testing import PeerProcess, RemoteHost
    from same_host_gpu_support import CudaHost, CudaMemory, MakeEngine, SecondCudaMemory

    memory: Callable[..., CudaMemory] = CudaMemory
    if where == "two GPUs":
        if torch.cuda.device_count() < 2:
            pytest.skip(f"{torch.cuda.device_count()} CUDA device, two are needed")
        memory = SecondCudaMemory
    last = processes[-1] if processes else None
    if not isinstance(last, PeerProcess) or not last.alive:
        last = PeerProcess()
        processes.append(last)
    there = RemoteHost(last, MakeEngine(), memory, 128 * MIB, 64 * MIB, host=CudaHost)
    here = CudaHost(MakeEngine(), CudaMemory, 128 * MIB, 64 * MIB)
    try:
        here.register((0, 64 * MIB))
        there.register((0, 64 * MIB))
        yield here, there
    finally:
        here.close()
        there.close()


@pytest.fixture(params=["one GPU", "two GPUs"])
def pair(request: pytest.FixtureRequest, processes: list[object]) -> Iterator[tuple[object, object]]:
    """The receiver is on the sender's GPU, or on another."""
    yield from make_pair(processes, request.param)
