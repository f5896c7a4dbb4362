"""A bounded fuzz of both sides of a same-host socket, and of every decoder in transfer/.

Each lasts a second or two in the suite, and ``KVARENA_FUZZ_SECONDS`` where that is set. What was tried is
written to standard error (``pytest -s``): counts, untyped errors, steps of more than 10 s,
bytes written where nothing was leased, descriptors and resident memory before and after. A crash ends the
test process itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvarena.errors import KvArenaError
from kvarena.pool import Arena, HostVmm
from kvarena.transfer import Lease, Manifest, PageBatch, PeerPages, Region, SubPoolManifest
from kvarena.transfer.same_host import wire
from kvarena.transfer.same_host.attach import Description
from kvarena.transfer.same_host.engine import SameHostEngine
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sockets import dial

MIB = 1 << 20
PAGE = 4096
SECONDS = float(os.environ.get("KVARENA_FUZZ_SECONDS", "1.5"))
FIELDS = (
    *("name", "identity", "epoch", "more", "add", "drop", "regions", "request", "serial", "why", "manifest"),
    *("base", "reserved_bytes", "memory", "device", "code", "differences"),
)
ODD = (
    *(None, True, 0, 1, -1, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 70, 0.5, "", "x", "../x", "\x00", "é" * 9),
    *([], [[]], [[0, MIB]], [[1, 0, MIB]], [[1, 1 << 62, 1 << 62]], [[1]] * 600, {}, {"a": []}),
)


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def some_packet(rng: random.Random) -> bytes:
    """Well formed, odd, cut, flipped, or nothing but noise."""
    if rng.random() < 0.15:
        return rng.randbytes(rng.randrange(1, 200))
    body: dict[str, Any] = {name: rng.choice(ODD) for name in rng.sample(FIELDS, rng.randrange(len(FIELDS)))}
    if rng.random() < 0.5:
        body |= {"epoch": rng.randrange(3), "more": rng.random() < 0.3, "drop": [], "add": [], "regions": []}
    data = bytearray(wire.encode(rng.choice(list(wire.PacketKind)), body))
    if rng.random() < 0.2:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data[: rng.randrange(1, len(data) + 1)] if rng.random() < 0.1 else data)


class Bench:
    """An engine that is fuzzed, and one that behaves: its pages must arrive, and no other byte change."""

    def __init__(self, directory: Path) -> None:
        self.stack = contextlib.ExitStack()
        self.arenas = [self.stack.enter_context(Arena(HostVmm(), 4 * MIB)) for _ in range(2)]
        for arena in self.arenas:
            arena.back(MIB)
        self.fuzzed, self.good = (
            self.stack.enter_context(
                SameHostEngine(arena, name=name, directory=directory, connect_timeout=0.5, drain_timeout=5)
            )
            for arena, name in zip(self.arenas, ("fuzzed", "good"), strict=True)
        )
        for engine, arena in zip((self.fuzzed, self.good), self.arenas, strict=True):
            engine.register([Region(arena.base, MIB)])
        self.arenas[1].tensor[:MIB].fill_(7)
        self.serial = 0

    def honest_pages_arrive(self) -> int:
        """Bytes that changed outside of the leased page: 0."""
        self.serial += 1
        page = self.serial % (MIB // PAGE)
        self.arenas[0].tensor[:MIB].fill_(1)
        lease = Lease(request="honest", serial=self.serial, epoch=0, pages={"full": (page,)})
        incoming = self.fuzzed.expect(lease, sender="good")
        peer = self.good.connect(self.fuzzed.describe())
        self.good.submit_pages(peer, PageBatch([3], [page], PAGE, lease)).wait(10)
        incoming.wait(10)
        tensor = self.arenas[0].tensor[:MIB]
        assert bool((tensor[page * PAGE : (page + 1) * PAGE] == 7).all())
        return int((tensor != 1).sum()) - PAGE


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two engines in this process."""
    bench = Bench(tmp_path / "s")
    with bench.stack:
        yield bench


def report(what: str, counts: Counter[str], before: tuple[int, int]) -> None:
    figures = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    sys.stderr.write(
        f"\nfuzz of {what}: {figures}; descriptors {before[0]} -> {descriptors()}, "
        f"resident {before[1]} -> {resident_kib()} KiB\n"
    )


def settled(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.timeout(120 + 3 * SECONDS)
def test_a_receiver_under_fuzz_serves_leaks_nothing_and_is_written_nowhere(bench: Bench) -> None:
    rng = random.Random(13)
    bench.honest_pages_arrive()
    before = (descriptors(), resident_kib())
    counts: Counter[str] = Counter(untyped=0, hangs=0, outside=0)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        counts["connections"] += 1
        began = time.monotonic()
        with dial(bench.fuzzed.socket_path, 10) as raw, contextlib.suppress(OSError):
            if rng.random() < 0.7:
                hello = {"name": f"s{rng.randrange(4)}", "identity": rng.choice("ab")}
                wire.transmit(raw, wire.encode(wire.PacketKind.HELLO, hello))
            for _ in range(rng.randrange(6)):
                counts["packets"] += 1
                wire.transmit(raw, some_packet(rng), [raw.fileno()] * rng.choice((0, 0, 1, 64)))
        counts["hangs"] += time.monotonic() - began > 10
        if counts["connections"] % 50 == 0:
            counts["outside"] += bench.honest_pages_arrive()
    counts["outside"] += bench.honest_pages_arrive()
    attached = lambda: set(bench.fuzzed.attached) == {"good"}  # noqa: E731
    assert settled(lambda: attached() and descriptors() <= before[0]), bench.fuzzed.attached
    report("a receiver", counts, before)
    assert counts["outside"] == counts["untyped"] == counts["hangs"] == 0
    assert counts["connections"] > 20
    assert resident_kib() < before[1] + 64 * 1024


@pytest.mark.timeout(120 + 3 * SECONDS)
def test_a_sender_under_fuzz_leaks_nothing_and_raises_typed_errors_in_time(
    bench: Bench, tmp_path: Path
) -> None:
    rng = random.Random(14)
    path = tmp_path / "s" / "false.sock"
    memory = os.memfd_create("kvarena-fuzz")
    os.ftruncate(memory, MIB)
    stop = threading.Event()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(8)
    listener.settimeout(0.2)

    def serve() -> None:
        while not stop.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            with sock, contextlib.suppress(OSError):
                if rng.random() < 0.8:
                    ring, fd = Ring.make()
                    ring.close()
                    welcome = {"identity": "id", "epoch": 1, "memory": "host", "device": "host"}
                    welcome |= {"base": 1 << 40, "reserved_bytes": MIB}
                    wire.transmit(sock, wire.encode(wire.PacketKind.WELCOME, welcome), [fd])
                    os.close(fd)
                for _ in range(rng.randrange(6)):
                    wire.transmit(sock, some_packet(rng), [memory] * rng.choice((0, 0, 1, 64)))

    bench.honest_pages_arrive()
    before = (descriptors(), resident_kib())
    thread = threading.Thread(target=serve)
    thread.start()
    about = {"format": "kvarena-same-host", "version": wire.VERSION, "path": str(path)}
    description = json.dumps({**about, "name": "false", "identity": "id", "epoch": 1}).encode()
    counts: Counter[str] = Counter(untyped=0, hangs=0, outside=0)
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            counts["connects"] += 1
            began = time.monotonic()
            try:
                bench.good.disconnect(bench.good.connect(description))
                counts["attached"] += 1
            except KvArenaError as error:
                counts[type(error).__name__] += 1
            except Exception:  # noqa: BLE001 - counted
                counts["untyped"] += 1
            counts["hangs"] += time.monotonic() - began > 10
    finally:
        stop.set()
        thread.join(10)
        listener.close()
        os.close(memory)
    counts["outside"] += bench.honest_pages_arrive()
    assert settled(lambda: descriptors() <= before[0])
    report("a sender", counts, before)
    assert counts["outside"] == counts["untyped"] == counts["hangs"] == 0
    assert counts["connects"] > 5
    assert resident_kib() < before[1] + 64 * 1024


def seeds() -> dict[str, tuple[Callable[[bytes], object], bytes]]:
    sub_pool = SubPoolManifest(name="full", page_bytes=PAGE, page_size=1, layers=(0,), dtype="bfloat16")
    manifest = Manifest(sub_pools=(sub_pool,))
    lease = Lease(request="r", serial=1, epoch=0, pages={"full": (1, 2)})
    pages = PeerPages(
        engine="e", description=b"d", manifest=manifest, epoch=1, seams=(1,), pages={"full": (1, 2)}
    )

    def decode_pages(data: bytes) -> object:
        try:
            return msgspec.msgpack.decode(data, type=PeerPages)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise KvArenaError(str(error)) from error

    return {
        "wire.decode": (wire.decode, wire.encode(wire.PacketKind.HELLO, {"name": "x", "identity": "y"})),
        "Description.decode": (Description.decode, Description("/x", "n", "i", 1).encode()),
        "Lease.decode": (Lease.decode, lease.encode()),
        "Manifest.decode": (Manifest.decode, manifest.encode()),
        "PeerPages": (decode_pages, msgspec.msgpack.encode(pages)),
    }


@pytest.mark.parametrize("name", sorted(seeds()))
def test_a_decoder_under_fuzz_answers_or_raises_a_typed_error(name: str) -> None:
    decode, seed = seeds()[name]
    decode(seed)
    rng = random.Random(15)
    before = (descriptors(), resident_kib())
    counts: Counter[str] = Counter(untyped=0, hangs=0)
    deadline = time.monotonic() + SECONDS / 3
    while time.monotonic() < deadline:
        data = bytearray(seed)
        for _ in range(rng.randrange(1, 8)):
            how = rng.random()
            at = rng.randrange(len(data) + 1)
            if how < 0.4 and data:
                data[at % len(data)] = rng.randrange(256)
            elif how < 0.7:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            elif how < 0.9:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data[at:at] = rng.choice((b"[" * 3000, b"\xff" * 40, b"\x91" * 3000, b"\xed\xa0\x80"))
        counts["inputs"] += 1
        began = time.monotonic()
        try:
            decode(bytes(data))
            counts["decoded"] += 1
        except KvArenaError:
            counts["refused"] += 1
        except Exception:  # noqa: BLE001 - counted
            counts["untyped"] += 1
        counts["hangs"] += time.monotonic() - began > 10
    report(name, counts, before)
    assert counts["untyped"] == counts["hangs"] == 0
    assert counts["inputs"] == counts["decoded"] + counts["refused"] > 100
    assert descriptors() == before[0]
