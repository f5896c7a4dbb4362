"""How fast pages move: each engine through kvarena, the same engine called raw, and memcpy.

    python bench/transfer.py [--engines mooncake nixl same-host] [--memory arena] [--rounds 15] [--json]

Two processes of this host. For every case the three are measured in turn, round by round, so that a busy
machine slows all of them: rates are medians, and a ratio is the median of the rounds' ratios. "raw" is
the fastest of the engine's own calls for the same bytes: the same coalesced copies, on the same
connection; below our same-host engine there is none. "memcpy" is plain copies within one process.
Memory: ``arena`` is one of the host driver, ``cuda`` one of the first GPU (memcpy is then one contiguous
copy), ``plain`` ordinary host memory, which same-host cannot export.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import _bench_path  # noqa: F401 - before kvarena
import numpy as np
from _transfer_sides import ENGINES, MEMORY, plain_copy
from kvarena.transfer import PageSide, plan_page_copies
from kvarena.transfer.testing import EngineHost, PeerProcess, RemoteHost

KIB, MIB = 1 << 10, 1 << 20
ARENA_BYTES = 512 * MIB


@dataclass(frozen=True)
class Case:
    """Pages to move, as lists of ids."""

    name: str
    page_bytes: int
    src: np.ndarray[Any, np.dtype[np.int64]]
    dst: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def nbytes(self) -> int:
        return self.page_bytes * len(self.src)


@dataclass(frozen=True)
class Row:
    """One measurement; GB/s are 1e9 bytes a second."""

    engine: str
    case: str
    nbytes: int
    operations: int
    memcpy_gb_s: float
    raw_gb_s: float | None
    kvarena_gb_s: float
    raw_call: str
    of_raw: float | None
    of_memcpy: float


def cases() -> list[Case]:
    """What the issue asks for: contiguous, in runs, fully random, and larger pages."""
    rng = np.random.default_rng(1)

    def contiguous(nbytes: int) -> Case:
        pages = np.arange(nbytes // (16 * KIB))
        return Case(f"contiguous {nbytes // MIB} MiB", 16 * KIB, pages, pages)

    def scattered(page_bytes: int, count: int, run: int) -> Case:
        runs = ARENA_BYTES // page_bytes // run
        starts = [rng.permutation(runs)[: count // run] * run for _ in range(2)]
        src, dst = ((start[:, None] + np.arange(run)).ravel() for start in starts)
        shape = "random" if run == 1 else f"runs of {run}"
        return Case(f"{count} x {page_bytes // KIB} KiB, {shape}", page_bytes, src, dst)

    return [
        contiguous(16 * MIB),
        contiguous(256 * MIB),
        scattered(16 * KIB, 2048, 8),
        scattered(16 * KIB, 2048, 1),
        scattered(64 * KIB, 2048, 1),
    ]


def measure(engine: str, memory: str, rounds: int, progress: Callable[[str], None]) -> list[Row]:
    """All cases with one engine and a peer process of its own."""
    make, raw = ENGINES[engine]
    source = EngineHost(make, MEMORY[memory], ARENA_BYTES, ARENA_BYTES)
    process = PeerProcess()
    target = RemoteHost(process, make, MEMORY[memory], ARENA_BYTES, ARENA_BYTES)
    here = MEMORY[memory](ARENA_BYTES, ARENA_BYTES)
    source.move_ledger()
    target.move_ledger()
    peer = source.engine.connect(target.describe())
    rows = []
    try:
        for case in cases():
            progress(f"{engine}: {case.name}")
            plan = plan_page_copies(
                PageSide(source.base, case.src), PageSide(target.base, case.dst), case.page_bytes
            )
            local = plan_page_copies(
                PageSide(source.base, case.src), PageSide(here.base, case.dst), case.page_bytes
            )

            def through_kvarena(case: Case = case) -> None:
                copies = plan_page_copies(
                    PageSide(source.base, case.src), PageSide(target.base, case.dst), case.page_bytes
                )
                source.engine.submit(peer, *copies).wait()

            theirs = raw(source.engine, peer, plan)
            plain = plain_copy(source.memory, here, local)
            seconds = in_turn(theirs | {"memcpy": plain, "kvarena": through_kvarena}, rounds)
            typical = {way: statistics.median(spent) for way, spent in seconds.items()}
            best = min(theirs, key=typical.__getitem__, default="")
            rate = {way: case.nbytes / spent / 1e9 for way, spent in typical.items()}
            rows.append(
                Row(
                    engine=engine,
                    case=case.name,
                    nbytes=case.nbytes,
                    operations=len(plan.src),
                    memcpy_gb_s=rate["memcpy"],
                    raw_gb_s=rate.get(best),
                    kvarena_gb_s=rate["kvarena"],
                    raw_call=best,
                    of_raw=ratio(seconds[best], seconds["kvarena"]) if best else None,
                    of_memcpy=ratio(seconds["memcpy"], seconds["kvarena"]),
                )
            )
    finally:
        source.close()
        process.close()
        here.close()
    return rows


def in_turn(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one round to warm up."""
    spent: dict[str, list[float]] = {way: [] for way in ways}
    names, order = list(ways), random.Random(2)
    for number in range(rounds + 1):
        # What precedes a measurement warms or cools the caches: another order each time.
        for way in order.sample(names, len(names)):
            started = time.perf_counter()
            ways[way]()
            if number:
                spent[way].append(time.perf_counter() - started)
    return spent


def ratio(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast ours is, typically, as theirs in the same round."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Page transfers: each engine through kvarena, raw, and memcpy."
    )
    parser.add_argument("--engines", nargs="+", choices=sorted(ENGINES), help="default: all that can")
    parser.add_argument("--memory", choices=sorted(MEMORY), default="arena")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the rows for programs")
    options = parser.parse_args(arguments)
    possible = [engine for engine in ENGINES if (engine, options.memory) != ("same-host", "plain")]
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    rows = []
    with console.status("") as status:
        for engine in options.engines or possible:
            rows += measure(engine, options.memory, options.rounds, status.update)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    table = Table(title=f"GB/s, two processes of this host, memory: {options.memory}")
    for column in ("engine", "case"):
        table.add_column(column, no_wrap=True)
    for column in ("copies", "memcpy", "raw", "kvarena", "of raw", "of memcpy"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.engine,
            row.case,
            str(row.operations),
            f"{row.memcpy_gb_s:.2f}",
            "" if row.raw_gb_s is None else f"{row.raw_gb_s:.2f}",
            f"{row.kvarena_gb_s:.2f}",
            "" if row.of_raw is None else f"{row.of_raw:.2f}",
            f"{row.of_memcpy:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
