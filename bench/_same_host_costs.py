"""Where the microseconds of one transfer go: each step by itself, in one process."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _bench_path  # noqa: F401 - before kvarena
import numpy as np
from _same_host_common import KIB, MIB, BenchLease, make_arena
from kvarena.transfer._same_host_incoming import IncomingTable, Source
from kvarena.transfer._same_host_leases import LeasedPart, SentLeases, lease_digest, page_ids
from kvarena.transfer._same_host_pending import SameHostPending
from kvarena.transfer._same_host_ring import Ring
from kvarena.transfer.protocol import Region
from kvarena.transfer.same_host import SameHostEngine

COSTS: list[tuple[str, float]] = []
PAGE = 16 * KIB


def cost(what: str, run: Callable[[int], object], reps: int = 300) -> None:
    """The median of one call, less what an empty one takes."""
    for index in range(10):
        run(index)
    times = []
    for index in range(10, reps + 10):
        start = time.perf_counter()
        run(index)
        times.append(time.perf_counter() - start)
    us = statistics.median(times) * 1e6
    if COSTS:
        us -= COSTS[0][1]
    COSTS.append((what, us))
    print(f"   {what:<58} {us:7.2f} us", flush=True)


def costs(device: str) -> None:
    """All of them."""
    COSTS.clear()
    cost("an empty call (taken off the others)", lambda _i: None)
    rng = np.random.default_rng(1)
    for pages in (64, 2048):
        leases_of(rng, pages)
    rings()
    arena = make_arena(device, 256 * MIB)
    with tempfile.TemporaryDirectory() as folder:
        names = (("a", Path(folder) / "s"), ("b", Path(folder) / "s"))
        here, there = (SameHostEngine(arena, name=name, directory=path) for name, path in names)
        with here, there:
            for engine in (here, there):
                engine.register([Region(arena.base, 256 * MIB)])
            peer = here.connect(there.describe())
            here.prepare(PAGE)
            for pages in (64, 2048):
                submits(here, peer, rng, pages)
            if device != "host":
                launches(here, arena.base, rng)
    arena.close()


def leases_of(rng: np.random.Generator, pages: int) -> None:
    ids = rng.permutation(16384)[:pages]
    lease = BenchLease("request", 1, {"full": tuple(ids.tolist())})
    digest = lease_digest(lease)
    cost(f"{pages} pages: a lease is first seen", lambda _i: LeasedPart(lease, "full", digest))
    part = LeasedPart(lease, "full", digest)
    other = rng.permutation(ids)

    def in_order(_index: int) -> None:
        part._upto, part._left = 0, pages
        part.take("request", "full", ids)

    cost(f"{pages} pages: lease check, in the lease's order", in_order)
    sent = [SentLeases() for _ in range(400)]
    for one in sent:
        one.admit(lease)
    cost(f"{pages} pages: lease check, shuffled", lambda i: sent[i].take(lease, "full", other))
    cost(f"{pages} pages: as an array of int64", lambda _i: page_ids(ids))
    cost(f"{pages} pages: the highest source", lambda _i: int(np.maximum.reduce(ids.view(np.uint64))))
    table = memoryview(np.zeros(pages, np.int64))

    def stage(_index: int) -> None:
        table[:] = ids  # type: ignore[assignment, call-overload, unused-ignore]

    cost(f"{pages} pages: one list of ids into a table", stage)


def rings() -> None:
    import os

    ring, fd = Ring.make()
    os.close(fd)
    lease = BenchLease("request", 1, {"full": tuple(range(1, 5000))})
    digest = lease_digest(lease)
    cost("completion record written", lambda _i: ring.begin(digest, 0, 1, 1), 900)
    table = IncomingTable()
    table.listen(Source("a", ring, lambda why: None))
    incoming = table.expect(lease, 1, None)
    cost("receiver looks, nothing new", lambda _i: incoming.done())

    def finish(index: int) -> None:
        ring._words[0] = index + 1
        incoming.done()

    cost("receiver reads one record", finish, 800)
    ring.close()


def submits(engine: SameHostEngine, peer: str, rng: np.random.Generator, pages: int) -> None:
    """The whole of `submit_pages`, with a copier that does nothing."""
    places = 256 * MIB // PAGE
    src = rng.permutation(places)[:pages]
    ids = [rng.permutation(places)[:pages] for _ in range(400)]
    leases = [BenchLease(f"r{pages}", index, {"full": row}) for index, row in enumerate(ids)]
    known = engine.peer(peer)
    for lease in leases:
        engine.admit(peer, lease)
    copier = known._way._copier
    idle = _Idle()
    known._way._copier = idle  # type: ignore[assignment]
    known._ring._words[8] = 1 << 40  # as if all was read
    cost(
        f"{pages} pages: submit_pages but for the copier",
        lambda i: engine.submit_pages(peer, src, ids[i], PAGE, leases[i]),
    )
    known._way._copier = copier
    known._remote._flying.clear()
    known._ring._words[8] = known._ring.started
    cost("a pending made", lambda _i: SameHostPending(copier, 1, known._remote, 1, "r"))


class _Idle:
    def copy_pages(self, *_: object) -> int:
        return 0


def launches(engine: SameHostEngine, base: int, rng: np.random.Generator) -> None:
    """What CUDA takes."""
    copier = engine._copier
    stream, device = copier._stream, copier._device  # type: ignore[attr-defined]
    launcher = copier._launchers[PAGE, True]  # type: ignore[attr-defined]
    table = copier._tables.take(copier._started)  # type: ignore[attr-defined]
    cost("is the context current", lambda _i: device.is_current())
    one = rng.permutation(8192)[:1]

    def wait(number: int) -> None:
        copier.wait(number, 10)

    def spaced(run: Callable[[int], object]) -> Callable[[int], object]:
        """So that launches do not queue up, the device is idle before each."""

        def both(index: int) -> None:
            run(index)

        return both

    for what, run in (
        ("kernel launch only (one program)", lambda _i: launcher.launch(1, base, base, table[2])),
        ("stream store only", lambda _i: stream.write(copier._tables.count_address, copier.ended)),  # type: ignore[attr-defined]
    ):
        times = []
        for index in range(200):
            start = time.perf_counter()
            spaced(run)(index)
            times.append(time.perf_counter() - start)
            stream.synchronize()
        COSTS.append((what, statistics.median(times) * 1e6))
        print(f"   {what:<58} {COSTS[-1][1]:7.2f} us", flush=True)
    cost("idle cuStreamSynchronize", lambda _i: stream.synchronize())
    cost("one page: start and wait", lambda _i: wait(copier.copy_pages(base, base, one, one, PAGE)))
    ring, fd = Ring.make()
    word = copier.adopt(ring.address, ring.nbytes)
    cost(
        "one page: start and wait, with a completion record",
        lambda i: wait(copier.copy_pages(base, base, one, one, PAGE, (word, i, ring.fail))),
    )
    copier.disown(ring.address)
    ring.close()
    import os

    os.close(fd)
    for pages in (64, 2048):
        ids = rng.permutation(8192)[:pages]
        starts = []

        def start_and_wait(_index: int, ids: np.ndarray = ids, starts: list[float] = starts) -> None:
            began = time.perf_counter()
            number = copier.copy_pages(base, base + 128 * MIB, ids, ids, PAGE)
            starts.append(time.perf_counter() - began)
            copier.wait(number, 10)

        cost(f"{pages} pages of 16 KiB: start and wait", start_and_wait)
        COSTS.append((f"{pages} pages: of these, until started", statistics.median(starts) * 1e6))
        print(f"   {COSTS[-1][0]:<58} {COSTS[-1][1]:7.2f} us", flush=True)
