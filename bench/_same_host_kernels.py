"""The gather-scatter kernel alone, in one process: how it is cut, waited for each time and back to back."""

from __future__ import annotations

import os
from functools import partial

import _bench_path  # noqa: F401 - before kvarena
import numpy as np
import torch
from _same_host_common import (
    CASES,
    KIB,
    MIB,
    POISON,
    Case,
    fill,
    make_arena,
    median_us,
    move_rows,
    plain_us,
    row,
    synchronize,
)
from kvarena.transfer.same_host.copy.cuda import CudaCopier
from kvarena.transfer.same_host.copy.kernel import Tuning

TUNINGS = [
    Tuning(16 * KIB, 4),
    Tuning(16 * KIB, 8),
    Tuning(64 * KIB, 8),
    Tuning(64 * KIB, 16),
    Tuning(128 * KIB, 32),
]
STEADY = 20


class Bench:
    """Two arenas on one GPU."""

    def __init__(self, arena_bytes: int) -> None:
        self.src, self.dst = make_arena("cuda:0", arena_bytes), make_arena("cuda:0", arena_bytes)
        self.source, self.target = self.src.tensor[:arena_bytes], self.dst.tensor[:arena_bytes]
        self.arena_bytes = arena_bytes
        self.rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))

    def close(self) -> None:
        synchronize("cuda:0")
        self.src.close()
        self.dst.close()


class Variant:
    """One kernel on one case, with fresh ids in each of eight turns."""

    def __init__(self, bench: Bench, case: Case, tuning: Tuning) -> None:
        self.bench = bench
        self.case = case
        self.copier = CudaCopier(0, tuning)
        places = bench.arena_bytes // case.page_bytes
        self.ids = [[bench.rng.permutation(places)[: case.pages] for _ in range(2)] for _ in range(8)]
        self.label = f"kernel {tuning.span_bytes // KIB}K w{tuning.num_warps}"

    def start(self, index: int) -> int:
        bench = self.bench
        src, dst = self.ids[index % 8]
        return self.copier.copy_pages(bench.src.base, bench.dst.base, src, dst, self.case.page_bytes)

    def once(self, index: int) -> None:
        self.copier.wait(self.start(index), 10)

    def steady(self, index: int) -> None:
        for step in range(STEADY - 1):
            self.start(index + step)
        self.once(index)

    def is_right(self, index: int) -> bool:
        bench = self.bench
        fill(bench.source, int(bench.rng.integers(1 << 30)))
        bench.target.fill_(POISON)
        synchronize("cuda:0")
        self.once(index)
        expected = torch.full_like(bench.target, POISON)
        move_rows(expected, bench.source, self.case.page_bytes, *self.ids[index])
        return torch.equal(expected, bench.target)

    def measure(self, plain: float) -> None:
        name, nbytes, reps = str(self.case), self.case.nbytes, self.case.reps
        wrong = "" if self.is_right(3) else " WRONG BYTES"
        row(f"{self.label}{wrong}", name, median_us(self.once, reps), nbytes, plain)
        row(f"{self.label}, back to back", name, median_us(self.steady, 5) / STEADY, nbytes, plain)
        self.copier.close()


def kernel_variants(arena_bytes: int) -> None:
    """Every tuning on every case, then the kernel for spans against the driver's copy."""
    bench = Bench(arena_bytes)
    for case in CASES:
        plain = plain_us("cuda:0", "cuda:0", case.nbytes, case.reps)
        row("plain copy", str(case), plain, case.nbytes, plain)
        for tuning in TUNINGS:
            if tuning.span_bytes <= max(16 * KIB, case.page_bytes):
                Variant(bench, case, tuning).measure(plain)
    for nbytes in (256 * KIB, MIB, 4 * MIB, 16 * MIB):
        one_span(bench, nbytes)
    bench.close()


def one_span(bench: Bench, nbytes: int) -> None:
    """A contiguous range in pieces below the size from which the driver's copy is used, and in one."""
    plain = plain_us("cuda:0", "cuda:0", nbytes, 50)
    copier = CudaCopier(0)

    def run(pieces: int, _index: int) -> None:
        length = nbytes // pieces
        starts = np.arange(pieces, dtype=np.int64) * length
        lengths = np.full(pieces, length, np.int64)
        copier.wait(copier.copy_spans(bench.src.base + starts, bench.dst.base + starts, lengths), 10)

    name = f"{nbytes // KIB} KiB"
    row("plain copy", name, plain, nbytes, plain)
    row("spans, one run", name, median_us(partial(run, 1), 50), nbytes, plain)
    row("spans of 128 KiB", name, median_us(partial(run, nbytes // (128 * KIB)), 50), nbytes, plain)
    copier.close()
