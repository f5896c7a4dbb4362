"""What bench/transfer.py compares: memory, engines over it, their own calls, and plain copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import _bench_path  # noqa: F401 - before kvarena
import numpy as np
from _same_host_common import make_arena, synchronize
from kvarena.transfer import MooncakeEngine, NixlEngine, PageCopies, Region, TransferEngine
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.testing import HostMemory

Calls = dict[str, Callable[[], None]]


class ArenaMemory:
    """An arena with one handle, as `EngineHost` asks for memory; nothing here grows it or writes to it."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.device = device
        self.arena = make_arena(device, nbytes)
        self.base = self.arena.base
        self.backed_bytes = self.arena.backed_bytes
        self.backed = Region(self.base, self.backed_bytes)
        self.arena.tensor[:nbytes].fill_(1)  # touched, so that no page fault is measured

    def close(self) -> None:
        self.arena.close()


def plain_memory(reserved_bytes: int, backed_bytes: int) -> Any:
    """Ordinary memory of this host."""
    memory = HostMemory(reserved_bytes, backed_bytes)
    ctypes.memset(memory.base, 1, backed_bytes)
    return memory


def arena_memory(reserved_bytes: int, backed_bytes: int) -> Any:
    """An arena of the host driver."""
    return ArenaMemory("host", backed_bytes)


def cuda_memory(reserved_bytes: int, backed_bytes: int) -> Any:
    """An arena of the first GPU."""
    return ArenaMemory("cuda:0", backed_bytes)


MEMORY = {"arena": arena_memory, "cuda": cuda_memory, "plain": plain_memory}


def _on_gpu(memory: Any) -> bool:
    return isinstance(memory, ArenaMemory) and memory.device != "host"


def make_mooncake(memory: Any) -> TransferEngine:
    """Over TCP."""
    return MooncakeEngine()


def make_nixl(memory: Any) -> TransferEngine:
    """With UCX, which is told where the memory is."""
    on_gpu = _on_gpu(memory)
    return NixlEngine(memory="VRAM" if on_gpu else "DRAM", vmm=on_gpu)


def make_same_host(memory: Any) -> TransferEngine:
    """Our own."""
    return SameHostEngine(memory.arena)


def raw_mooncake(engine: Any, peer: str, copies: PageCopies) -> Calls:
    """Mooncake's calls for a batch of writes."""
    te = engine._engine
    columns = [column.tolist() for column in copies]

    def sync() -> None:
        assert te.batch_transfer_sync_write(peer, *columns) == 0

    def asynchronous() -> None:
        batch = te.batch_transfer_async_write(peer, *columns)
        assert te.get_batch_transfer_status([batch]) == 0

    return {"batch_transfer_sync_write": sync, "batch_transfer_async_write": asynchronous}


def raw_nixl(engine: Any, peer: str, copies: PageCopies) -> Calls:
    """NIXL's calls for a batch of writes: descriptors made anew, as for pages that differ each time."""
    agent = engine._agent

    def descriptors(addresses: Any) -> Any:
        rows = np.stack([addresses, copies.lengths, np.zeros_like(addresses)], axis=1).astype(np.uint64)
        return agent.get_xfer_descs(rows, engine.memory)

    def write() -> None:
        handle = agent.initialize_xfer("WRITE", descriptors(copies.src), descriptors(copies.dst), peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        handle.release()
        assert state == "DONE"

    return {"initialize_xfer": write}


def raw_same_host(engine: Any, peer: str, copies: PageCopies) -> Calls:
    """There is nothing below our own engine but plain copies."""
    return {}


ENGINES: dict[str, tuple[Callable[[Any], TransferEngine], Callable[[Any, str, PageCopies], Calls]]] = {
    "mooncake": (make_mooncake, raw_mooncake),
    "nixl": (make_nixl, raw_nixl),
    "same-host": (make_same_host, raw_same_host),
}


def plain_copy(source: Any, target: Any, copies: PageCopies) -> Callable[[], None]:
    """The same bytes within this process: each copy with memmove; on a GPU one copy of as many bytes."""
    if _on_gpu(source):
        nbytes = int(copies.lengths.sum())
        src, dst = source.arena.tensor[:nbytes], target.arena.tensor[:nbytes]

        def on_device() -> None:
            dst.copy_(src)
            synchronize(source.device)

        return on_device

    columns = [column.tolist() for column in (copies.dst, copies.src, copies.lengths)]

    def on_host() -> None:
        for to, start, nbytes in zip(*columns, strict=True):
            ctypes.memmove(to, start, nbytes)

    return on_host
