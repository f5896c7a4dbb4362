"""Where the microseconds of one transfer go: each step by itself, in one process."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench_path  # noqa: F401 - before kvarena
import numpy as np
from _same_host_common import KIB, MIB, BenchLease, make_arena
from kvarena.transfer import PageBatch
from kvarena.transfer.pages.plan import page_ids
from kvarena.transfer.protocol import Region
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.same_host.incoming import IncomingTable, Source
from kvarena.transfer.same_host.pending import SameHostPending
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sent_leases import LeasedPart, SentLeases, lease_digest

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
    table = np.zeros(pages, np.int64)

    def stage(_index: int) -> None:
        np.left_shift(ids, 32, table)
        np.bitwise_or(table, ids, table)

    cost(f"{pages} pages: ids into a table", stage)


def rings() -> None:
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
    known: Any = engine.peer(peer)
    for lease in leases:
        engine.admit(peer, lease)
    time.sleep(0.3)  # the other engine of this process reads all that
    copier = known._push._copier
    idle = _Idle()
    known._push._copier = idle
    known._tickets.ring._words[8] = 1 << 40  # as if all was read
    cost(
        f"{pages} pages: submit_pages but for the copier",
        lambda i: engine.submit_pages(peer, PageBatch(src, ids[i], PAGE, leases[i])),
    )
    known._push._copier = copier
    known._push._flying.clear()
    known._tickets.ring._words[8] = known._tickets.ring.started
    cost("a pending made", lambda _i: SameHostPending(copier, 1, known._push, 1, "r"))


class _Idle:
    def copy_pages(self, *_: object) -> int:
        return 0


def launches(engine: SameHostEngine, base: int, rng: np.random.Generator) -> None:
    """What CUDA takes."""
    copier: Any = engine._copier
    stream, count = copier._stream, copier._tables.count_address
    launcher = copier._launchers[PAGE, True]
    address = copier._tables.take(copier._started)[1]
    cost("is the context current", lambda _i: copier._device.is_current())
    cost("idle cuStreamSynchronize", lambda _i: stream.synchronize())
    spaced("kernel launch only (one program)", stream, lambda: launcher.launch(1, base, base, address))
    spaced("stream store only", stream, lambda: stream.write(count, copier.ended))
    spaced("two stream stores", stream, lambda: stream.write_both(count, copier.ended, count, copier.ended))
    one = rng.permutation(8192)[:1]
    ring, fd = Ring.make()
    os.close(fd)
    word = copier.adopt(ring.address, ring.nbytes)
    for what, signal in (("", None), (", with a completion record", lambda: (word, 1, ring.fail))):
        cost(
            f"one page: start and wait{what}",
            lambda _i, signal=signal: copier.wait(  # type: ignore[misc]
                copier.copy_pages(base, base, one, one, PAGE, signal), 10
            ),
        )
    copier.disown(ring.address)
    ring.close()
    for pages in (64, 2048):
        for rest in (0.0, 1e-3):
            start_and_wait(copier, base, rng.permutation(8192)[:pages], rest)


def spaced(what: str, stream: Any, run: Callable[[], None]) -> None:
    """The call by itself: nothing is queued before it."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        stream.synchronize()
    note(what, times)


def start_and_wait(copier: Any, base: int, ids: np.ndarray, rest: float) -> None:
    """A copier's whole part in a transfer, and how much of it is the start."""
    starts, ends = [], []
    for _ in range(200):
        time.sleep(rest) if rest else None
        began = time.perf_counter()
        number = copier.copy_pages(base, base + 128 * MIB, ids, ids, PAGE)
        starts.append(time.perf_counter() - began)
        copier.wait(number, 10)
        ends.append(time.perf_counter() - began)
    after = f", after {rest * 1e3:g} ms of rest" if rest else ""
    note(f"{ids.size} pages of 16 KiB: start and wait{after}", ends)
    note(f"{ids.size} pages of 16 KiB: of these, until started{after}", starts)


def note(what: str, times: list[float]) -> None:
    COSTS.append((what, statistics.median(times) * 1e6))
    print(f"   {what:<58} {COSTS[-1][1]:7.2f} us", flush=True)
