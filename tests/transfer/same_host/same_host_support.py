"""Both sides of a same-host transfer, for tests here and in processes of their own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvarena.pool import Arena, HostVmm
from kvarena.transfer import Lease, PageBatch, Region
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.testing import EngineHost

MIB = 1 << 20
PAGE = 16384


class ArenaMemory:
    """An arena of the host driver, as the engine contract asks for memory."""

    def __init__(self, reserved_bytes: int, backed_bytes: int) -> None:
        self.arena = Arena(HostVmm(), reserved_bytes)
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
        memoryview(self.arena.tensor.numpy())[offset : offset + len(data)] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(memoryview(self.arena.tensor.numpy())[offset : offset + nbytes])

    def close(self) -> None:
        self.arena.close()


class MakeEngine:
    """An engine factory: sockets in one directory, and the options of `SameHostEngine`."""

    def __init__(self, directory: Path | None = None, **options: Any) -> None:
        self.directory = directory
        self.options = options

    def __call__(self, memory: ArenaMemory) -> SameHostEngine:
        return SameHostEngine(memory.arena, directory=self.directory, **self.options)


class SameHost(EngineHost):
    """An `EngineHost` whose leases, arena and process can be asked about."""

    engine: SameHostEngine
    memory: ArenaMemory

    def expect(self, *leases: Lease) -> None:
        self.incoming = {lease.serial: self.engine.expect(lease) for lease in leases}

    def arrived(self, serial: int, timeout: float = 10.0) -> bool:
        self.incoming[serial].wait(timeout)
        return self.incoming[serial].done()

    def pages_left(self, serial: int) -> int:
        return self.incoming[serial].pages_left

    def comes_down_to(self, serial: int, pages: int) -> bool:
        """Reports are under way for a moment after the sender is done."""
        deadline = time.monotonic() + 10
        while self.incoming[serial].pages_left != pages and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.incoming[serial].pages_left == pages

    def revoke(self, lease: Lease) -> None:
        self.engine.revoke(lease)

    def connect(self, description: bytes) -> str:
        return self.engine.connect(description)

    def send(self, peer: str, lease: Lease, src: list[int], dst: list[int]) -> None:
        self.engine.submit_pages(peer, PageBatch(src, dst, PAGE, lease)).wait(10)

    def admit(self, peer: str, lease: Lease) -> None:
        self.engine.admit(peer, lease)

    def attached(self) -> tuple[str, ...]:
        return self.engine.attached

    def shrink(self, nbytes: int) -> None:
        self.memory.arena.shrink(nbytes)

    def read_pages(self, pages: list[int]) -> list[bytes]:
        return [self.read(page * PAGE, PAGE) for page in pages]

    def fill_and_grow_cycle(self, small: int, large: int) -> None:
        """Grow, register the delta; then take it back and give the memory back."""
        self.memory.arena.grow(large)
        self.register((small, large - small))
        self.unregister((small, large - small))
        self.memory.arena.shrink(small)

    def back_anew(self, nbytes: int) -> None:
        self.memory.arena.back(nbytes)

    def refresh(self) -> None:
        self.engine.refresh()

    def grow_in_steps(self, start: int, steps: int, nbytes: int) -> None:
        for step in range(1, steps + 1):
            self.memory.arena.grow(start + step * nbytes)


def a_lease(pages: list[int], serial: int = 1, request: str = "r", sub_pool: str = "full") -> Lease:
    return Lease(request=request, serial=serial, epoch=0, pages={sub_pool: tuple(pages)})
