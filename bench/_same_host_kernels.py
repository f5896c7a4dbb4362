"""The gather-scatter kernel alone, in one process: how it is cut, and how page ids reach it."""

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
from cuda.bindings import driver as cu
from kvarena.transfer._copy_flight import Slots
from kvarena.transfer._copy_kernel import Tuning, compile_pages, compile_spans
from kvarena.transfer._copy_launch import Device, Launcher, check

TUNINGS = [
    Tuning(8 * KIB, 4),
    Tuning(16 * KIB, 4),
    Tuning(16 * KIB, 8),
    Tuning(32 * KIB, 4),
    Tuning(32 * KIB, 8),
    Tuning(64 * KIB, 8),
    Tuning(16 * KIB, 4, "evict_first"),
    Tuning(32 * KIB, 8, "evict_first"),
]
LARGE_PAGE_TUNINGS = [Tuning(16 * KIB, 4), Tuning(32 * KIB, 8)]
STEADY = 20


class Bench:
    """Two arenas on one GPU, and what a launch takes."""

    def __init__(self, arena_bytes: int) -> None:
        self.src, self.dst = make_arena("cuda:0", arena_bytes), make_arena("cuda:0", arena_bytes)
        self.source, self.target = self.src.tensor[:arena_bytes], self.dst.tensor[:arena_bytes]
        self.arena_bytes = arena_bytes
        self.device = Device(0)
        self.slots = Slots(self.device)
        self.uploaded = torch.empty(16 * KIB, dtype=torch.int64, device="cuda:0")
        self.rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))

    def wait(self, _index: int = 0) -> None:
        check(cu.cuStreamSynchronize(self.device.stream), "cuStreamSynchronize")

    def table(self, words: np.ndarray) -> int:
        """Words in pinned memory; every run is waited for, so slots are free again at once."""
        table, address = self.slots.take()
        self.slots.used_by(None)
        table[: words.size] = words
        return address

    def close(self) -> None:
        synchronize("cuda:0")
        self.slots.close()
        self.device.close()
        self.src.close()
        self.dst.close()


class Variant:
    """One kernel on one case, with fresh ids in each of eight turns."""

    def __init__(self, bench: Bench, case: Case, tuning: Tuning) -> None:
        self.bench = bench
        self.case = case
        self.launcher = Launcher(compile_pages(bench.device.capability, case.page_bytes, True, tuning), 3)
        self.programs = case.pages * -(-case.page_bytes // self.launcher.span_bytes)
        places = bench.arena_bytes // case.page_bytes
        self.ids = [[bench.rng.permutation(places)[: case.pages] for _ in range(2)] for _ in range(8)]
        self.pairs = [np.stack(ids, axis=1).ravel() for ids in self.ids]
        self.label = f"{tuning.span_bytes // KIB}K w{tuning.num_warps} {tuning.eviction}".strip()

    def launch(self, table: int) -> None:
        bench = self.bench
        self.launcher.launch(self.programs, bench.device.stream, bench.src.base, bench.dst.base, table)

    def mapped(self, index: int) -> None:
        self.launch(self.bench.table(self.pairs[index % 8]))
        self.bench.wait()

    def copied(self, index: int) -> None:
        stream, uploaded = self.bench.device.stream, self.bench.uploaded.data_ptr()
        host = self.bench.table(self.pairs[index % 8])
        check(cu.cuMemcpyHtoDAsync(uploaded, host, self.case.pages * 16, stream), "cuMemcpyHtoDAsync")
        self.launch(uploaded)
        self.bench.wait()

    def steady(self, _index: int) -> None:
        table = self.bench.table(self.pairs[0])
        for _ in range(STEADY):
            self.launch(table)
        self.bench.wait()

    def is_right(self, index: int, run: object) -> bool:
        bench = self.bench
        fill(bench.source, int(bench.rng.integers(1 << 30)))
        bench.target.fill_(POISON)
        synchronize("cuda:0")
        assert callable(run)
        run(index)
        expected = torch.full_like(bench.target, POISON)
        move_rows(expected, bench.source, self.case.page_bytes, *self.ids[index])
        return torch.equal(expected, bench.target)

    def measure(self, plain: float) -> None:
        name, nbytes, reps = str(self.case), self.case.nbytes, self.case.reps
        for way, run in (("mapped ids", self.mapped), ("copied ids", self.copied)):
            wrong = "" if self.is_right(3, run) else " WRONG BYTES"
            row(f"{self.label}, {way}{wrong}", name, median_us(run, reps), nbytes, plain)
        row(f"{self.label}, back to back", name, median_us(self.steady, 5) / STEADY, nbytes, plain)
        self.launcher.close()


def kernel_variants(arena_bytes: int) -> None:
    """Every tuning on every case, then the kernel for spans, and what a bare launch costs."""
    bench = Bench(arena_bytes)
    for case in CASES:
        plain = plain_us("cuda:0", "cuda:0", case.nbytes, case.reps)
        row("plain copy", str(case), plain, case.nbytes, plain)
        small = [t for t in TUNINGS if t.span_bytes <= max(16 * KIB, case.page_bytes)]
        for tuning in LARGE_PAGE_TUNINGS if case.page_bytes >= MIB else small:
            Variant(bench, case, tuning).measure(plain)
    spans(bench)
    bench.close()


def spans(bench: Bench) -> None:
    launcher = Launcher(compile_spans(bench.device.capability, True, Tuning()), 1)
    starts = np.arange(4096, dtype=np.int64)[:, None] * 16 * KIB
    words = np.full_like(starts, 4 * KIB)
    rows = np.concatenate((starts + bench.src.base, starts + bench.dst.base, words), axis=1).ravel()
    stream = bench.device.stream

    def run(count: int, wait: bool, _index: int) -> None:
        launcher.launch(count, stream, bench.table(rows[: 3 * count]))
        if wait:
            bench.wait()

    plain = plain_us("cuda:0", "cuda:0", 64 * MIB, 50)
    row("spans kernel", "64 MiB", median_us(partial(run, 4096, True), 50), 64 * MIB, plain)
    print(f"   an idle synchronize {median_us(bench.wait, 200):.1f} us")
    print(f"   one program, launch only {median_us(partial(run, 1, False), 20):.1f} us")
    print(f"   one program, launch and synchronize {median_us(partial(run, 1, True), 200):.1f} us")
    bench.wait()
    launcher.close()
