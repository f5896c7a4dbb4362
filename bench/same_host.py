"""The same-host engine against a plain device copy of the same bytes, in one run.

    PYTHONPATH=.types python3 bench/same_host.py     # on a machine with a GPU (two: also GPU to GPU)
    python bench/same_host.py --host                 # the same protocol over host memory, anywhere

Every section stands alone and prints as it goes; a table comes last, and ``$OUT/same_host.json`` has all
figures. Times are medians in microseconds, end to end from Python with a wait each time; GB/s are one
way (10^9).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import _bench_path  # noqa: F401 - before kvarena
import numpy as np
import torch
from _same_host_common import (
    CASES,
    CONTIGUOUS,
    MIB,
    POISON,
    TABLE,
    BenchLease,
    Case,
    fill,
    make_arena,
    median_us,
    move_rows,
    plain_us,
    row,
    section,
    synchronize,
)
from _same_host_costs import COSTS, costs
from kvarena.pool import Arena
from kvarena.transfer import PageBatch
from kvarena.transfer.protocol import Region
from kvarena.transfer.same_host.engine import SameHostEngine

WAYS = ("admitted", "first seen", "shuffled", "after 1 ms of rest")
WARM = 3
IN_FLIGHT = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", action="store_true", help="host memory and the host driver")
    parser.add_argument("--arena-mib", type=int, default=1024)
    parser.add_argument("--skip-kernel", action="store_true", help="only the engine, as it is tuned now")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.host:
        section("what each step takes, one process", lambda: costs("host"))
        section("two processes, host memory", lambda: engine_pair("host", "host", options.arena_mib * MIB))
    else:
        print(f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}, torch {torch.__version__}")
        if not options.skip_kernel:
            section("kernel variants, one process", lambda: kernels(options.arena_mib * MIB))
        section("what each step takes, one process", lambda: costs("cuda:0"))
        pairs = [("one GPU", "cuda:0")]
        if torch.cuda.device_count() > 1:
            pairs.append(("two GPUs", "cuda:1"))
        for where, there in pairs:
            section(f"two processes, {where}", partial(engine_pair, "cuda:0", there, options.arena_mib * MIB))
    print(f"\n{'what':<34} {'case':<16} {'us':>9} {'GB/s':>8} {'of plain':>8}  target")
    for what, case, us, rate, ratio, target in TABLE:
        print(f"{what:<34} {case:<16} {us:9.1f} {rate:8.1f} {ratio:8.2f}  {target}")
    print(f"{time.perf_counter() - began:.0f} s in all")
    out = Path(os.environ.get("OUT", tempfile.gettempdir()))
    (out / "same_host.json").write_text(json.dumps({"table": TABLE, "costs": COSTS}))


def kernels(arena_bytes: int) -> None:
    """Imported here: it needs Triton, and fails in its own section."""
    from _same_host_kernels import kernel_variants

    kernel_variants(arena_bytes)


def engine_pair(src_device: str, dst_device: str, arena_bytes: int) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "sockets"
        process = context.Process(target=receiver, args=(there, dst_device, arena_bytes, str(directory)))
        process.start()
        try:
            sender(here, src_device, dst_device, arena_bytes, directory)
            process.join(30)
        finally:
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def an_engine(
    device: str, arena_bytes: int, directory: Path, name: str
) -> Iterator[tuple[Arena, SameHostEngine]]:
    arena = make_arena(device, arena_bytes)
    try:
        with SameHostEngine(arena, name=name, directory=directory) as engine:
            engine.register([Region(arena.base, arena_bytes)])
            yield arena, engine
    finally:
        arena.close()


def ask(pipe: Any, *message: Any) -> Any:
    pipe.send(message)
    return answer(pipe)


def answer(pipe: Any) -> Any:
    if not pipe.poll(120):
        raise TimeoutError("the other process does not answer")
    return pipe.recv()


def sender(pipe: Any, src_device: str, dst_device: str, arena_bytes: int, directory: Path) -> None:
    what = "engine" if src_device == dst_device else "two GPUs"
    with an_engine(src_device, arena_bytes, directory, "sender") as (arena, engine):
        description = answer(pipe)
        start = time.perf_counter()
        peer = engine.connect(description)
        print(f"   attached to {arena_bytes // MIB} MiB in {(time.perf_counter() - start) * 1e3:.2f} ms")
        seed = int.from_bytes(os.urandom(3), "little")
        fill(arena.tensor[:arena_bytes], seed)
        synchronize(src_device)
        base = engine.peer(peer).arena_base
        for nbytes, target, reps in CONTIGUOUS:
            if nbytes > arena_bytes:
                continue
            reps = min(reps, 5) if src_device == "host" else reps
            plain = plain_us(src_device, dst_device, nbytes, reps)
            places = arena_bytes // nbytes
            ask(pipe, "poison")

            us = median_us(partial(whole, engine, peer, arena.base, base, nbytes, places), reps)
            good = ask(pipe, "check contiguous", seed, nbytes, min(places, max(reps, 3)))
            name = f"{nbytes // MIB} MiB"
            row("plain copy", name, plain, nbytes, plain)
            row(what + ("" if good else " WRONG BYTES"), name, us, nbytes, plain, target)
        for case in CASES:
            if src_device == "host":
                if case.nbytes > arena_bytes // 4:
                    continue
                case = case._replace(reps=5)
            pages_case(pipe, engine, peer, arena, case, seed, src_device, dst_device, what)
        pipe.send(("end",))


def whole(
    engine: SameHostEngine, peer: str, src: int, dst: int, nbytes: int, places: int, index: int
) -> None:
    start = index % places * nbytes
    engine.submit(peer, [src + start], [dst + start], [nbytes]).wait(30)


def pages_case(
    pipe: Any,
    engine: SameHostEngine,
    peer: str,
    arena: Arena,
    case: Case,
    seed: int,
    src_device: str,
    dst_device: str,
    what: str,
) -> None:
    plain = plain_us(src_device, dst_device, case.nbytes, case.reps)
    engine.prepare(case.page_bytes)
    rng = np.random.default_rng(seed)
    places = arena.backed_bytes // case.page_bytes
    sources = [rng.permutation(places)[: case.pages] for _ in range(8)]
    for round_, way in enumerate(WAYS):
        leases, targets = new_leases(pipe, arena, case, seed, round_, src_device)
        if way == "shuffled":
            targets = [rng.permutation(target) for target in targets]
        if way != "first seen":
            for lease in leases:
                engine.admit(peer, lease)
        if way == "first seen":  # as a lease is when it comes from the control plane
            leases = [lease._replace(pages={"full": tuple(lease.pages["full"])}) for lease in leases]
        order = [target.tolist() for target in targets] if way == "shuffled" else None
        starts, submitted, ends = [], [], []
        for index, lease in enumerate(leases):
            if way == "after 1 ms of rest":
                time.sleep(0.001)
            starts.append(time.perf_counter())
            pending = engine.submit_pages(
                peer, PageBatch(sources[index % 8], targets[index], case.page_bytes, lease)
            )
            submitted.append(time.perf_counter())
            pending.wait(30)
            ends.append(time.perf_counter())
        known, good = ask(pipe, "check pages", seed, sources, order)
        us, heard = _median_us(ends, starts), _median_us(known, starts)
        if way == "admitted":
            row("plain copy", str(case), plain, case.nbytes, plain)
        wrong = "" if good else " WRONG BYTES"
        row(f"{what}, lease {way}{wrong}", str(case), us, case.nbytes, plain, case.target)
        print(f"      of these, until submitted {_median_us(submitted, starts):.1f} us")
        if way in ("admitted", "after 1 ms of rest"):
            row(f"{what}, until receiver knows", str(case), heard, case.nbytes, plain)
    back_to_back(pipe, engine, peer, arena, case, sources, seed, src_device, dst_device, what)


def new_leases(
    pipe: Any, arena: Arena, case: Case, seed: int, round_: int, device: str
) -> tuple[list[BenchLease], list[np.ndarray]]:
    """Fresh bytes here, and leases of the receiver with the pages that each names."""
    fill(arena.tensor[: arena.backed_bytes], seed)
    synchronize(device)
    leases = [BenchLease(*lease) for lease in ask(pipe, "leases", case, seed + round_)]
    return leases, [np.array(lease.pages["full"]) for lease in leases]


def back_to_back(
    pipe: Any,
    engine: SameHostEngine,
    peer: str,
    arena: Arena,
    case: Case,
    sources: list[np.ndarray],
    seed: int,
    src_device: str,
    dst_device: str,
    what: str,
) -> None:
    """As a busy pair sends: the next request's pages are submitted while those before are on their way."""
    plain = plain_us(src_device, dst_device, case.nbytes, case.reps, in_flight=IN_FLIGHT)
    leases, targets = new_leases(pipe, arena, case, seed, len(WAYS), src_device)
    for lease in leases:
        engine.admit(peer, lease)
    pending = []
    for index, lease in enumerate(leases):
        if index == WARM:
            began = time.perf_counter()
        if index >= IN_FLIGHT:
            pending[index - IN_FLIGHT].wait(30)
        pending.append(
            engine.submit_pages(peer, PageBatch(sources[index % 8], targets[index], case.page_bytes, lease))
        )
    for one in pending[-IN_FLIGHT:]:
        one.wait(30)
    us = (time.perf_counter() - began) / (len(leases) - WARM) * 1e6
    _, good = ask(pipe, "check pages", seed, sources, None)
    wrong = "" if good else " WRONG BYTES"
    row(f"plain copy, {IN_FLIGHT} under way", str(case), plain, case.nbytes, plain)
    row(f"{what}, {IN_FLIGHT} under way{wrong}", str(case), us, case.nbytes, plain, case.target)


def _median_us(ends: list[float], starts: list[float]) -> float:
    """The first few warm everything up."""
    return float(statistics.median(np.subtract(ends, starts)[WARM:])) * 1e6


def receiver(pipe: Any, device: str, arena_bytes: int, directory: str) -> None:
    with an_engine(device, arena_bytes, Path(directory), "receiver") as (arena, engine):
        own = arena.tensor[:arena_bytes]
        pipe.send(engine.describe())
        case: Case | None = None
        leases: list[BenchLease] = []
        known: list[float] = []
        while (message := answer(pipe))[0] != "end":
            if message[0] == "poison":
                own.fill_(POISON)
                synchronize(device)
                pipe.send(True)
            elif message[0] == "check contiguous":
                _, seed, nbytes, places = message
                expected = torch.empty_like(own)
                fill(expected, seed)
                pipe.send(torch.equal(expected[: nbytes * places], own[: nbytes * places]))
            elif message[0] == "leases":
                case, seed = Case(*message[1]), message[2]
                own.fill_(POISON)
                synchronize(device)
                rng = np.random.default_rng(seed + 1)
                places = arena_bytes // case.page_bytes
                leases = [
                    BenchLease(f"{case}", index, {"full": rng.permutation(places)[: case.pages].tolist()})
                    for index in range(case.reps + WARM)
                ]
                leases = [lease._replace(request=f"{lease.request} {seed}") for lease in leases]
                incoming = [engine.expect(lease) for lease in leases]
                pipe.send([tuple(lease) for lease in leases])
                known = []
                for one in incoming:
                    one.wait(60)
                    known.append(time.perf_counter())
            elif message[0] == "check pages":
                _, seed, sources, order = message
                assert case is not None
                filled, expected = torch.empty_like(own), torch.full_like(own, POISON)
                fill(filled, seed)
                for index, lease in enumerate(leases):
                    ids = np.array(lease.pages["full"] if order is None else order[index])
                    move_rows(expected, filled, case.page_bytes, sources[index % 8], ids)
                pipe.send((known, torch.equal(expected, own)))


if __name__ == "__main__":
    main()
