"""What the arena costs over the bare driver calls that it cannot do without, side by side in one run.

    python bench/arena.py                                  # the host driver, 256 MiB
    PYTHONPATH=.types python3 bench/arena.py --device cuda --json cuda.json

Each row does the same work twice, in turn: with bare calls (``cuMem*``, or
``memfd``/``mmap``), and through kvarena. The ratio is kvarena / bare; 1.00 is
the floor. "recorded" is the figure of an H200 with driver 580.159.04.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from kvarena.pool import Arena, CudaVmm, Driver, HostVmm, MHASubPoolSpec, UnifiedKVPool

GIB = 1 << 30
RECORDED_MS = {
    ("cuda", "reserve 4 TiB"): 0.008,
    ("cuda", "back 64.00 GiB, one handle"): 0.6 + 0.05 + 2.2 + 15,
    ("cuda", "swap a sink for 8.00 GiB"): 0.4 + 8 / 64 * 15,
    ("cuda", "zero 64.00 GiB"): 15.0,
    ("cuda", "close 64.00 GiB, one handle"): 0.7 + 30,
}


class Bare(Protocol):
    """Driver calls with nothing around them."""

    granularity: int

    def reserve(self, nbytes: int) -> int: ...
    def unreserve(self, address: int, nbytes: int) -> None: ...
    def create(self, nbytes: int) -> Any: ...
    def map(self, address: int, nbytes: int, handle: Any) -> None: ...
    def unmap(self, address: int, nbytes: int) -> None: ...
    def release(self, handle: Any) -> None: ...
    def zero(self, address: int, nbytes: int) -> None: ...


class BareCuda:
    """``cuda.bindings.driver``, unchecked but for success."""

    def __init__(self) -> None:
        from cuda.bindings import driver as cu

        self.cu = cu
        torch.ones(1, device="cuda")
        location = cu.CUmemLocation()
        location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = torch.cuda.current_device()
        prop = self.prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = location
        prop.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        prop.allocFlags.gpuDirectRDMACapable = 1
        access = self.access = cu.CUmemAccessDesc()
        access.location = location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._ok(cu.cuMemGetAllocationGranularity(prop, minimum)))

    @staticmethod
    def _ok(answer: tuple[Any, ...]) -> Any:
        assert answer[0].value == 0, answer[0]
        return answer[1] if len(answer) > 1 else None

    def reserve(self, nbytes: int) -> int:
        return int(self._ok(self.cu.cuMemAddressReserve(nbytes, 0, 0, 0)))

    def unreserve(self, address: int, nbytes: int) -> None:
        self._ok(self.cu.cuMemAddressFree(address, nbytes))

    def create(self, nbytes: int) -> Any:
        return self._ok(self.cu.cuMemCreate(nbytes, self.prop, 0))

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._ok(self.cu.cuMemMap(address, nbytes, 0, handle, 0))
        self._ok(self.cu.cuMemSetAccess(address, nbytes, [self.access], 1))

    def unmap(self, address: int, nbytes: int) -> None:
        self._ok(self.cu.cuMemUnmap(address, nbytes))

    def release(self, handle: Any) -> None:
        self._ok(self.cu.cuMemRelease(handle))

    def zero(self, address: int, nbytes: int) -> None:
        self._ok(self.cu.cuMemsetD8Async(address, 0, nbytes, 0))
        self._ok(self.cu.cuStreamSynchronize(0))


class BareHost:
    """``memfd``, ``mmap`` and ``mprotect``."""

    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.libc.mmap.restype = ctypes.c_void_p
        word = ctypes.c_size_t
        self.libc.mmap.argtypes = [ctypes.c_void_p, word, *[ctypes.c_int] * 3, ctypes.c_int64]
        self.libc.munmap.argtypes = [ctypes.c_void_p, word]
        self.libc.mprotect.argtypes = [ctypes.c_void_p, word, ctypes.c_int]

    def reserve(self, nbytes: int) -> int:
        return int(self.libc.mmap(None, nbytes, 0, 0x4022, -1, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        self.libc.munmap(address, nbytes)

    def create(self, nbytes: int) -> Any:
        fd = os.memfd_create("bare")
        os.posix_fallocate(fd, 0, nbytes)
        return fd

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self.libc.mmap(address, nbytes, 0, 0x11, handle, 0)
        self.libc.mprotect(address, nbytes, 3)

    def unmap(self, address: int, nbytes: int) -> None:
        self.libc.mmap(address, nbytes, 0, 0x4032, -1, 0)

    def release(self, handle: Any) -> None:
        os.close(handle)

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)


class Row(NamedTuple):
    """Milliseconds, medians."""

    work: str
    bare_ms: float
    kvarena_ms: float
    recorded_ms: float | None


class Bench:
    """One driver's rows."""

    def __init__(self, name: str, repeat: int) -> None:
        self.name = name
        self.repeat = repeat
        self.bare: Bare = BareCuda() if name == "cuda" else BareHost()
        self.driver: Driver = CudaVmm() if name == "cuda" else HostVmm()
        self.rows: list[Row] = []

    def row(self, work: str, bare: Callable[[], float], ours: Callable[[], float]) -> None:
        """Both in turn, after one round that warms up."""
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(self.repeat + 1):
            for side, step in enumerate((bare, ours)):
                seconds = step()
                if turn:
                    times[side].append(seconds * 1000)
        recorded = RECORDED_MS.get((self.name, work))
        self.rows.append(Row(work, statistics.median(times[0]), statistics.median(times[1]), recorded))

    def run(self, size: int, swap_size: int, chunk: int) -> None:
        self.row("reserve 4 TiB", lambda: self._bare_reserve(4 << 40), lambda: self._our_reserve(4 << 40))
        one = f"{size / GIB:.2f} GiB, one handle"
        self.row(f"back {one}", lambda: self._bare_back(size)[0], lambda: self._our_back(size)[0])
        self.row(f"close {one}", lambda: self._bare_back(size)[1], lambda: self._our_back(size)[1])
        self.row(
            f"zero {size / GIB:.2f} GiB",
            lambda: self._zero(self.bare.zero, size),
            lambda: self._zero(self.driver.zero, size),
        )
        swap = f"swap a sink for {swap_size / GIB:.2f} GiB"
        self.row(swap, lambda: self._bare_swap(swap_size), lambda: self._our_swap(swap_size))
        self.row(
            f"finalize a pool to {swap_size / GIB:.2f} GiB",
            lambda: self._beside_a_pool(swap_size),
            lambda: self._pool(swap_size),
        )
        many = f"grow {swap_size / GIB:.2f} GiB in {swap_size // chunk} handles"
        self.row(many, lambda: self._bare_grow(swap_size, chunk), lambda: self._our_grow(swap_size, chunk))

    def _bare_fill(self, address: int, size: int) -> None:
        if not self.driver.fresh_is_zero:
            self.bare.zero(address, size)

    def _bare_reserve(self, size: int) -> float:
        start = time.perf_counter()
        address = self.bare.reserve(size)
        taken = time.perf_counter() - start
        self.bare.unreserve(address, size)
        return taken

    def _our_reserve(self, size: int) -> float:
        start = time.perf_counter()
        arena = Arena(self.driver, size)
        taken = time.perf_counter() - start
        arena.close()
        return taken

    def _bare_back(self, size: int) -> tuple[float, float]:
        address = self.bare.reserve(size)
        start = time.perf_counter()
        handle = self.bare.create(size)
        self.bare.map(address, size, handle)
        self._bare_fill(address, size)
        backed = time.perf_counter()
        self.bare.unmap(address, size)
        self.bare.release(handle)
        self.bare.unreserve(address, size)
        return backed - start, time.perf_counter() - backed

    def _our_back(self, size: int) -> tuple[float, float]:
        arena = Arena(self.driver, size)
        start = time.perf_counter()
        arena.back(size)
        backed = time.perf_counter()
        arena.close()
        return backed - start, time.perf_counter() - backed

    def _zero(self, zero: Callable[[int, int], None], size: int) -> float:
        with Arena(self.driver, size) as arena:
            arena.back(size)
            start = time.perf_counter()
            zero(arena.base, size)
            return time.perf_counter() - start

    def _bare_swap(self, size: int) -> float:
        bare, sink = self.bare, self.bare.granularity
        address = bare.reserve(size)
        first = bare.create(sink)
        bare.map(address, sink, first)
        start = time.perf_counter()
        handle = bare.create(size)
        bare.unmap(address, sink)
        bare.map(address, size, handle)
        self._bare_fill(address, size)
        bare.release(first)
        taken = time.perf_counter() - start
        bare.unmap(address, size)
        bare.release(handle)
        bare.unreserve(address, size)
        return taken

    def _our_swap(self, size: int) -> float:
        with Arena(self.driver, size) as arena:
            arena.back(1)
            start = time.perf_counter()
            arena.back(size)
            return time.perf_counter() - start

    def _make_pool(self, size: int) -> UnifiedKVPool:
        specs = [
            MHASubPoolSpec("full", "up", 16, 8, 64, torch.bfloat16),
            MHASubPoolSpec("swa", "down", 16, 8, 64, torch.bfloat16),
        ]
        return UnifiedKVPool(
            total_bytes=size,
            sub_pool_specs=specs,
            driver=self.driver,
            page_size=2,
            post_capture_active=True,
        )

    def _beside_a_pool(self, size: int) -> float:
        # The driver goes on with memory that was released, and makes new memory slower some time later
        # (4 to 9 ms after 50 ms): both sides must come as long after the last release.
        pool = self._make_pool(size)
        taken = self._bare_swap(size)
        pool.close()
        return taken

    def _pool(self, size: int) -> float:
        pool = self._make_pool(size)
        start = time.perf_counter()
        pool.finalize_backing(SimpleNamespace(unified_memory_pool_bytes=size))
        taken = time.perf_counter() - start
        pool.close()
        return taken

    def _bare_grow(self, size: int, chunk: int) -> float:
        address = self.bare.reserve(size)
        handles = []
        start = time.perf_counter()
        for offset in range(0, size, chunk):
            handles.append(self.bare.create(chunk))
            self.bare.map(address + offset, chunk, handles[-1])
            self._bare_fill(address + offset, chunk)
        taken = time.perf_counter() - start
        for index, handle in enumerate(handles):
            self.bare.unmap(address + index * chunk, chunk)
            self.bare.release(handle)
        self.bare.unreserve(address, size)
        return taken

    def _our_grow(self, size: int, chunk: int) -> float:
        with Arena(self.driver, size) as arena:
            start = time.perf_counter()
            arena.back(chunk)
            for end in range(2 * chunk, size + 1, chunk):
                arena.grow(end)
            return time.perf_counter() - start


def show(name: str, rows: Sequence[Row]) -> None:
    """A table; plain columns where rich is not installed."""
    head = ("work", "bare ms", "kvarena ms", "ratio", "recorded ms")
    cells = [
        (
            row.work,
            f"{row.bare_ms:.3f}",
            f"{row.kvarena_ms:.3f}",
            f"{row.kvarena_ms / row.bare_ms:.2f}",
            "" if row.recorded_ms is None else f"{row.recorded_ms:.3f}",
        )
        for row in rows
    ]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for line in (head, *cells):
            print(f"{line[0]:40}", *(f"{cell:>12}" for cell in line[1:]))
        return
    table = Table(title=f"arena on {name}", title_justify="left")
    for index, title in enumerate(head):
        table.add_column(title, justify="right" if index else "left")
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["host", "cuda"], action="append", help="default: host")
    parser.add_argument("--gib", type=float, help="size of the one-handle rows (host 0.25, cuda 64)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    found = {}
    for name in options.device or ["host"]:
        bench = Bench(name, options.repeat)
        granule = bench.driver.granularity
        size = int((options.gib or (64 if name == "cuda" else 0.25)) * GIB) // granule * granule
        swap = min(size, 8 * GIB)
        bench.run(size, swap, swap // 64)
        show(name, bench.rows)
        found[name] = [row._asdict() for row in bench.rows]
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
