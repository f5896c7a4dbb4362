"""Two sides that have nothing in common but their manifests: pages arrive all the same."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvarena.pool import Arena, HostVmm
from kvarena.transfer import (
    ArenaPages,
    Capabilities,
    LeaseTable,
    Manifest,
    PageChannel,
    PageMoves,
    RecordingEngine,
    Region,
    RegistrationLedger,
    SameHostEngine,
    SubPoolManifest,
)
from kvarena.transfer.testing import assert_same_bytes

UNIT = 4096


@dataclass
class Side:
    """An arena of some size, in some handles, registered in some steps; page 0 lies somewhere in it."""

    arena: Arena
    ledger: RegistrationLedger
    channel: PageChannel
    first: int
    nbytes: int

    def read(self) -> bytearray:
        return bytearray(memoryview(self.arena.tensor.numpy())[: self.nbytes])


Engines = Callable[[contextlib.ExitStack, Arena, random.Random], Any]


def recording(_stack: contextlib.ExitStack, _arena: Arena, choose: random.Random) -> RecordingEngine:
    return RecordingEngine(
        capabilities=Capabilities(
            crosses_seams=False,
            spans_handles=choose.random() < 0.5,
            live_reregistration=choose.random() < 0.5,
            max_region_bytes=choose.choice([None, 5000, 8192, 20480]),
        )
    )


@pytest.fixture
def same_host(tmp_path: Path) -> Engines:
    def make(stack: contextlib.ExitStack, arena: Arena, choose: random.Random) -> SameHostEngine:
        engine = SameHostEngine(arena, directory=tmp_path / "s")
        stack.callback(engine.close)
        return engine

    return make


def make_side(
    stack: contextlib.ExitStack, engines: Engines, manifest: Manifest, choose: random.Random
) -> Side:
    arena = stack.enter_context(Arena(HostVmm(), UNIT * choose.randrange(48, 96)))
    arena.back(UNIT * choose.randrange(16, 32))
    engine = engines(stack, arena, choose)
    ledger = RegistrationLedger(engine)
    for more in range(choose.randrange(3)):
        if more or choose.random() < 0.5:
            register(ledger, arena)
        arena.grow(arena.backed_bytes + UNIT * choose.randrange(1, 8))
    register(ledger, arena)
    first, nbytes = choose.choice([0, 16, UNIT]), arena.backed_bytes
    pages = {
        each.name: ArenaPages(arena.base + first, (nbytes - first) // each.page_bytes)
        for each in manifest.sub_pools
    }
    memoryview(arena.tensor.numpy())[:nbytes] = choose.randbytes(nbytes)
    return Side(arena, ledger, PageChannel(ledger, manifest, lambda: pages), first, nbytes)


def register(ledger: RegistrationLedger, arena: Arena) -> None:
    backed = Region(arena.base, arena.backed_bytes)
    ledger.move_to([backed], backed=backed, handle_seams=arena.seams, live=True)


def move_some(stack: contextlib.ExitStack, engines: Engines, seed: int) -> None:
    choose = random.Random(seed)
    sizes = [choose.choice([48, 64, 1000, UNIT]) for _ in range(choose.randrange(1, 4))]
    manifest = Manifest(
        sub_pools=tuple(
            SubPoolManifest(name=f"pool{i}", page_bytes=size, page_size=1, layers=(i,), dtype="uint8")
            for i, size in enumerate(sizes)
        )
    )
    source, target = (make_side(stack, engines, manifest, choose) for _ in range(2))
    sent, expected = source.read(), target.read()
    share = (target.nbytes - target.first) // len(sizes)  # sub-pools overlap, what they hold does not
    moves, leased = {}, {}
    for i, size in enumerate(sizes):
        there = range(-(-i * share // size), (i + 1) * share // size)
        here = (source.nbytes - source.first) // size
        count = choose.randrange(1 + min(40, len(there), here))
        start, begin = choose.randrange(1 + len(there) - count), choose.randrange(1 + here - count)
        dst = choose.choice([list(there[start : start + count]), choose.sample(there, count)])
        src = choose.choice([list(range(begin, begin + count)), choose.choices(range(here), k=count)])
        moves[f"pool{i}"], leased[f"pool{i}"] = PageMoves(src, dst), dst
        for s, d in zip(src, dst, strict=True):
            at, to = source.first + s * size, target.first + d * size
            expected[to : to + size] = sent[at : at + size]
    lease = LeaseTable().grant("r", leased, epoch=target.ledger.epoch)
    arrival = target.channel.expect(lease)
    peer = source.channel.connect(target.channel.hello())
    source.channel.send(peer, lease, moves).wait(10)
    if arrival is not None:
        arrival.wait(10)
    assert_same_bytes(target.read(), expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_planned_copies(seed: int) -> None:
    with contextlib.ExitStack() as stack:
        move_some(stack, recording, seed)


@pytest.mark.parametrize("seed", range(12))
def test_mapped_pages(same_host: Engines, seed: int) -> None:
    with contextlib.ExitStack() as stack:
        move_some(stack, same_host, seed)
