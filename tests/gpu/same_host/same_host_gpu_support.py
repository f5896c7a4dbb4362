"""Arenas on a GPU, for tests here and in processes of their own."""

from __future__ import annotations

from typing import Any

import torch
from kvarena.pool import Arena, CudaVmm
from kvarena.transfer import Lease, Region
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.testing import EngineHost


class CudaMemory:
    """An arena on a CUDA device, as the engine contract asks for memory."""

    device = 0

    def __init__(self, reserved_bytes: int, backed_bytes: int) -> None:
        torch.cuda.set_device(self.device)
        self.arena = Arena(CudaVmm(self.device), reserved_bytes)
        self.arena.back(backed_bytes)

    @property
    def base(self) -> int:
        return self.arena.base

    @property
    def backed_bytes(self) -> int:
        return self.arena.backed_bytes

    @property
    def backed(self) -> Region:
        return Region(self.arena.base, self.arena.backed_bytes)

    def grow(self, backed_bytes: int) -> None:
        self.arena.grow(backed_bytes)

    def write(self, offset: int, data: bytes) -> None:
        host = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.arena.tensor[offset : offset + len(data)].copy_(host)
        torch.cuda.synchronize()

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.arena.tensor[offset : offset + nbytes].cpu().numpy().tobytes()

    def close(self) -> None:
        self.arena.close()


class SecondCudaMemory(CudaMemory):
    """The same on the second device."""

    device = 1


class MakeEngine:
    """An engine factory with the options of `SameHostEngine`."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, memory: CudaMemory) -> SameHostEngine:
        return SameHostEngine(memory.arena, **self.options)


class CudaHost(EngineHost):
    """An `EngineHost` with leases."""

    engine: SameHostEngine
    memory: CudaMemory

    def expect(self, lease: Lease) -> None:
        self.incoming = self.engine.expect(lease)

    def arrived(self, timeout: float = 20.0) -> bool:
        self.incoming.wait(timeout)
        return self.incoming.done()

    def fill(self, value: int) -> None:
        self.memory.arena.tensor[: self.memory.backed_bytes].fill_(value)
        torch.cuda.synchronize()

    def fill_and_grow_cycle(self, small: int, large: int) -> None:
        self.memory.arena.grow(large)
        self.register((small, large - small))
        self.unregister((small, large - small))
        self.memory.arena.shrink(small)
