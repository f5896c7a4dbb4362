"""What the same-host benchmarks share: cases, arenas, random bytes, a plain copy, and the table."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import _bench_path  # noqa: F401 - before kvarena
import numpy as np
import torch
from kvarena.pool import Arena, HostVmm

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POISON = 0xA5


class BenchLease(NamedTuple):
    """What the engine reads of a lease."""

    request: str
    serial: int
    pages: Any


class Case(NamedTuple):
    """Pages of one size."""

    pages: int
    page_bytes: int
    target: str
    reps: int

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes

    def __str__(self) -> str:
        unit = f"{self.page_bytes // MIB} MiB" if self.page_bytes >= MIB else f"{self.page_bytes // KIB} KiB"
        return f"{self.pages} x {unit}"


CASES = [
    Case(2048, 64 * KIB, ">= 1500 GB/s", 60),
    Case(2048, 16 * KIB, ">= 800 GB/s", 60),
    Case(64, 16 * KIB, "<= 30 us", 300),
    Case(512, MIB, "", 30),
]
CONTIGUOUS = [(256 * MIB, ">= 0.9 of plain", 30), (16 * MIB, "", 100), (900 * MIB, "", 10)]
TABLE: list[tuple[str, str, float, float, float, str]] = []


def section(name: str, run: Callable[[], None]) -> None:
    print(f"\n== {name}", flush=True)
    began = time.perf_counter()
    try:
        run()
    except Exception:  # noqa: BLE001 - the other sections still tell something
        traceback.print_exc()
        print(f"!! {name} failed", flush=True)
    print(f"   {time.perf_counter() - began:.1f} s", flush=True)


def row(what: str, case: str, us: float, nbytes: int, plain_us: float, target: str = "") -> None:
    TABLE.append((what, case, us, nbytes / us / 1e3, plain_us / us, target))
    print(
        f"   {what:<34} {case:<16} {us:9.1f} us {nbytes / us / 1e3:8.1f} GB/s {plain_us / us:6.2f}",
        flush=True,
    )


def median_us(run: Callable[[int], None], reps: int) -> float:
    for index in range(3):
        run(index)
    times = []
    for index in range(reps):
        start = time.perf_counter()
        run(index)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def make_arena(device: str, nbytes: int) -> Arena:
    if device == "host":
        arena = Arena(HostVmm(), 2 * nbytes)
    else:
        from kvarena.pool import CudaVmm

        torch.cuda.set_device(device)
        arena = Arena(CudaVmm(device), 2 * nbytes)
    arena.back(nbytes)
    return arena


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Random bytes that another process can make again."""
    words = tensor.view(torch.int64)
    generator = torch.Generator(tensor.device)
    generator.manual_seed(seed)
    words.random_(generator=generator)


def synchronize(device: str) -> None:
    if device != "host":
        torch.cuda.synchronize(device)


def plain_us(src_device: str, dst_device: str, nbytes: int, reps: int, *, in_flight: int = 1) -> float:
    """A plain copy between ordinary allocations, waited for each time, or when that many are under way."""
    where = ["cpu" if device == "host" else device for device in (src_device, dst_device)]
    size = max(nbytes, min(GIB, 4 * nbytes))
    src = torch.empty(size, dtype=torch.uint8, device=where[0])
    dst = torch.empty(size, dtype=torch.uint8, device=where[1])
    fill(src, 7)
    places = size // nbytes

    def copy(index: int) -> None:
        for step in range(in_flight):
            start = (index + step) % places * nbytes
            dst[start : start + nbytes].copy_(src[start : start + nbytes], non_blocking=True)
        synchronize(src_device)

    return median_us(copy, reps) / in_flight


def move_rows(
    dst: torch.Tensor, src: torch.Tensor, page_bytes: int, src_pages: np.ndarray, dst_pages: np.ndarray
) -> None:
    from_ids = torch.as_tensor(src_pages, device=src.device)
    to_ids = torch.as_tensor(dst_pages, device=dst.device)
    dst.view(torch.int64).view(-1, page_bytes // 8)[to_ids] = src.view(torch.int64).view(-1, page_bytes // 8)[
        from_ids
    ]
