"""How long the allocators take, by the size of the pool and of the request.

One thread, medians, microseconds. Beside each figure for a free stands what
SGLang 0.5.23 took on a comparable machine (facts/sglang.md, section 8), whose
free grows with the pool; it is another run, so compare shapes rather than digits.

    python bench/allocator.py [--json] [--device cuda] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from kvarena.pool import (
    CudaVmm,
    HostVmm,
    MHASubPoolSpec,
    MultiEndedAllocator,
    UnifiedKVPool,
    UnifiedSWATokenToKVPoolAllocator,
)
from rich.console import Console
from rich.table import Table

PAGES = (10_000, 100_000, 1_000_000)
COUNTS = (64, 1024, 4096)
COLUMNS = (
    "alloc",
    "free",
    "free_scattered",
    "alloc_from_holes",
    "available_size",
    "translate",
    "hybrid_alloc",
    "hybrid_free",
    "compact",
)
# Pages and k to (eager free, lazy free), microseconds.
SGLANG_FREE = {
    (10_000, 1024): (1703, 181),
    (100_000, 64): (814, 344),
    (100_000, 4096): (5332, 491),
    (1_000_000, 64): (9784, 2441),
    (1_000_000, 4096): (7532, 2344),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures for programs")
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(arguments.device, pages, arguments.repeats) for pages in PAGES]
    flat = [row for part in rows for row in part]
    if arguments.json:
        print(json.dumps({"device": arguments.device, "unit": "us", "rows": flat}, indent=2))
    else:
        Console().print(as_table(flat))


def measure(device: str, pages: int, repeats: int) -> list[dict[str, Any]]:
    """All figures for one size of pool; a page is one token of 16 bytes a side."""
    specs = [
        MHASubPoolSpec("full", "up", 1, 1, 8, torch.uint8),
        MHASubPoolSpec("swa", "down", 1, 1, 8, torch.uint8),
    ]
    pool = UnifiedKVPool(
        total_bytes=2 * pages * 16, sub_pool_specs=specs, driver=CudaVmm(0) if device == "cuda" else HostVmm()
    )
    rows = []
    for count in COUNTS:
        if count * 4 > pages:
            continue
        row: dict[str, Any] = {"pages": pages, "k": count}
        row.update(alone(MultiEndedAllocator(pool, "full"), pages, count, repeats))
        row.update(hybrid(UnifiedSWATokenToKVPoolAllocator(pool), pages, count, repeats))
        rows.append(row)
    pool.close()
    return rows


def alone(allocator: MultiEndedAllocator, pages: int, count: int, repeats: int) -> dict[str, float]:
    held = allocator.alloc(pages // 2)  # a pool in use
    assert held is not None
    taken: list[Any] = []
    row = {
        "alloc": timed(
            lambda: taken.append(allocator.alloc(count)), repeats, lambda: free_all(allocator, taken)
        )
    }
    row["free"] = timed(
        lambda: allocator.free(taken.pop()), repeats, before=take_into(taken, allocator, count)
    )
    row["available_size"] = timed(allocator.available_size, repeats, inner=100)
    ids = held[:count].to(allocator.pool.device)
    row["translate"] = timed(lambda: allocator.translate_kv_loc(ids), repeats)
    # Holes all over the pool, and requests made of them.
    scattered = held[torch.randperm(len(held), generator=torch.Generator().manual_seed(0))]
    parts = list(scattered[: count * (len(scattered) // 2 // count)].split(count))
    used = parts[: max(1, min(repeats, len(parts)))]
    row["free_scattered"] = statistics.median(once(lambda p=part: allocator.free(p)) for part in used)
    again: list[Any] = []
    row["alloc_from_holes"] = statistics.median(
        once(lambda: again.append(allocator.alloc(count))) for _ in used
    )
    return row


def hybrid(
    allocator: UnifiedSWATokenToKVPoolAllocator, pages: int, count: int, repeats: int
) -> dict[str, float]:
    allocator.alloc(pages // 2)
    taken: list[Any] = []
    row = {
        "hybrid_alloc": timed(take_into(taken, allocator, count), repeats, lambda: free_all(allocator, taken))
    }
    row["hybrid_free"] = timed(
        lambda: allocator.free(taken.pop()), repeats, before=take_into(taken, allocator, count)
    )

    def spread() -> None:
        """`count` pages at the frontier, as many holes far from it."""
        allocator.clear()
        first, _, last = allocator.alloc(count), allocator.alloc(pages // 4), allocator.alloc(count)
        assert first is not None
        assert last is not None
        allocator.free(first)

    row["compact"] = timed(allocator.compact, min(repeats, 10), before=spread)
    return row


def take_into(taken: list[Any], allocator: Any, count: int) -> Callable[[], None]:
    return lambda: taken.append(allocator.alloc(count))


def free_all(allocator: Any, taken: list[Any]) -> None:
    while taken:
        allocator.free(taken.pop())


def timed(
    call: Callable[[], Any],
    repeats: int,
    after: Callable[[], Any] = lambda: None,
    *,
    before: Callable[[], Any] = lambda: None,
    inner: int = 1,
) -> float:
    times = []
    for _ in range(repeats + 3):
        before()
        times.append(once(call, inner))
        after()
    return statistics.median(times[3:])


def once(call: Callable[[], Any], inner: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - start) / inner * 1e6


def as_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Allocators: microseconds, medians, one thread, page size 1")
    for column in ("pages", "k", *COLUMNS, "SGLang free (eager / lazy)"):
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        other = SGLANG_FREE.get((row["pages"], row["k"]))
        table.add_row(
            f"{row['pages']:,}",
            str(row["k"]),
            *(f"{row[column]:.1f}" for column in COLUMNS),
            "" if other is None else f"{other[0]} / {other[1]}",
        )
    return table


if __name__ == "__main__":
    main()
