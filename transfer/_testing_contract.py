"""What every transfer engine must do, as tests to inherit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import pytest
from kvarena.transfer._testing_hosts import (
    EngineFactory,
    EngineHost,
    MemoryFactory,
    RemoteHost,
    Sides,
)
from kvarena.transfer._testing_memory import HostMemory, leftovers
from kvarena.transfer.errors import RegistrationError, TransferFailed, TransferTimeout
from kvarena.transfer.pages import plan_page_copies
from kvarena.transfer.protocol import Pending

__all__ = ["Pair", "TransferEngineContract"]

MIB = 1 << 20


class Pair:
    """The two sides of a test: `source` here, `target` in another process."""

    def __init__(
        self,
        source: EngineHost,
        target: EngineHost | RemoteHost,
        make_target: Callable[[], EngineHost | RemoteHost],
    ) -> None:
        self.source = source
        self.target = target
        self.make_target = make_target

    def connect(self) -> str:
        """Connect the source to the target as it is now."""
        return self.source.engine.connect(self.target.describe())

    def submit(self, peer: str, *copies: tuple[int, int, int]) -> Pending:
        """Write (source offset, target offset, nbytes)."""
        src, dst, lengths = (list(column) for column in zip(*copies, strict=True)) if copies else ([], [], [])
        return self.source.engine.submit(
            peer, [self.source.base + s for s in src], [self.target.base + d for d in dst], lengths
        )


class TransferEngineContract:
    """Inherit, and say how to make the engine:

    .. code-block:: python

        from kvarena.transfer.testing import Standalone, TransferEngineContract

        class TestMyEngine(TransferEngineContract):
            engine_factory = Standalone(MyEngine)

    Every test gets a fresh pair of engines, so what one test breaks no other sees, unless `reuses_engines`.
    """

    engine_factory: ClassVar[EngineFactory]
    """Importable by its name from another process, unless `in_process`."""
    memory_factory: ClassVar[MemoryFactory] = HostMemory
    in_process: ClassVar[bool] = False
    """The engine only reaches engines of its own process."""
    reuses_engines: ClassVar[bool] = False
    """One pair of engines serves all tests, each with new memory: for engines that are slow to close."""
    reserved_bytes: ClassVar[int] = 16 * MIB
    backed_bytes: ClassVar[int] = 8 * MIB
    page_bytes: ClassVar[int] = 16384
    timeout: ClassVar[float] = 20.0
    """Seconds within which a transfer of a few MiB ends, and within which a dead peer is noticed."""
    leak_allowance: ClassVar[tuple[int, int, int]] = (2, 16, 0)
    """File descriptors, mappings and threads by which three engines may change the process."""

    @pytest.fixture
    def pair(self, kvarena_sides: Sides) -> Iterator[Pair]:
        """A source here and a target there, nothing registered."""
        cls, sides = type(self), kvarena_sides
        args = (cls.engine_factory, cls.memory_factory, cls.reserved_bytes, cls.backed_bytes)
        made: list[EngineHost | RemoteHost] = []

        def make_target() -> EngineHost | RemoteHost:
            made.append(EngineHost(*args) if cls.in_process else RemoteHost(sides.process(), *args))
            return made[-1]

        if cls.reuses_engines:
            if sides.source is None:
                sides.source = EngineHost(*args)
            if sides.target is None or not sides.target.process.alive:
                sides.target = RemoteHost(sides.process(), *args)
            pair = Pair(sides.source, sides.target, make_target)
            yield pair
            sides.source.renew()
            if isinstance(pair.target, RemoteHost):
                sides.target = pair.target
                sides.target.renew()
        else:
            source = EngineHost(*args)
            made.append(source)
            try:
                yield Pair(source, make_target(), make_target)
            finally:
                for host in made:
                    host.close()

    @pytest.fixture
    def ready(self, pair: Pair) -> Pair:
        """A pair whose ledgers hold all backed memory, filled with different bytes on each side."""
        pair.source.move_ledger()
        pair.target.move_ledger()
        pair.source.write(0, _pattern(1, self.backed_bytes))
        pair.target.write(0, _pattern(2, self.backed_bytes))
        return pair

    def test_written_pages_arrive_and_no_other_byte_changes(self, ready: Pair) -> None:
        peer = ready.connect()
        expected = bytearray(_pattern(2, self.backed_bytes))
        num_pages = self.backed_bytes // self.page_bytes
        src, dst = _some_pages(num_pages, 3), _some_pages(num_pages, 4)
        plan = plan_page_copies(
            ready.source.base,
            src,
            ready.target.base,
            dst,
            self.page_bytes,
            src_seams=ready.source.seams(),
            dst_seams=ready.target.seams(),
        )
        ready.source.engine.submit(peer, *plan).wait(self.timeout)
        sent = _pattern(1, self.backed_bytes)
        for s, d in zip(src, dst, strict=True):
            expected[d * self.page_bytes : (d + 1) * self.page_bytes] = sent[
                s * self.page_bytes : (s + 1) * self.page_bytes
            ]
        assert ready.target.read(0, self.backed_bytes) == bytes(expected)

    def test_a_range_of_odd_length_and_alignment_arrives(self, ready: Pair) -> None:
        ready.submit(ready.connect(), (7, 1001, 4099)).wait(self.timeout)
        expected = bytearray(_pattern(2, self.backed_bytes))
        expected[1001 : 1001 + 4099] = _pattern(1, self.backed_bytes)[7 : 7 + 4099]
        assert ready.target.read(0, self.backed_bytes) == bytes(expected)

    def test_a_transfer_can_be_polled(self, ready: Pair) -> None:
        pending = ready.submit(ready.connect(), (0, 0, self.backed_bytes))
        assert _ends(pending, self.timeout)
        assert pending.done()
        assert ready.target.read(0, self.backed_bytes) == _pattern(1, self.backed_bytes)

    def test_several_transfers_are_under_way_at_once(self, ready: Pair) -> None:
        peer = ready.connect()
        piece = self.backed_bytes // 8
        for pending in [ready.submit(peer, (i * piece, i * piece, piece)) for i in range(8)]:
            pending.wait(self.timeout)
        assert ready.target.read(0, self.backed_bytes) == _pattern(1, self.backed_bytes)

    def test_more_operations_than_a_batch_takes(self, ready: Pair) -> None:
        limit = ready.source.engine.capabilities.max_batch or 4096
        count = min(limit + 1, self.backed_bytes // 256)
        offsets = list(range(0, count * 256, 256))
        random.Random(5).shuffle(offsets)
        ready.submit(ready.connect(), *((o, o, 128) for o in offsets)).wait(3 * self.timeout)
        expected = np.frombuffer(_pattern(2, self.backed_bytes), np.uint8).copy().reshape(-1, 256)
        expected[:count, :128] = np.frombuffer(_pattern(1, self.backed_bytes), np.uint8).reshape(-1, 256)[
            :count, :128
        ]
        assert ready.target.read(0, self.backed_bytes) == expected.tobytes()

    def test_an_empty_batch_ends_well(self, ready: Pair) -> None:
        ready.submit(ready.connect()).wait(self.timeout)
        assert ready.target.read(0, self.backed_bytes) == _pattern(2, self.backed_bytes)

    def test_lists_of_different_lengths_are_refused(self, ready: Pair) -> None:
        peer = ready.connect()
        with pytest.raises((TransferFailed, ValueError)):
            ready.source.engine.submit(peer, [ready.source.base] * 2, [ready.target.base], [16])

    def test_a_registration_can_be_taken_back_and_made_again(self, pair: Pair) -> None:
        span = (0, self.backed_bytes)
        for _ in range(3):
            pair.target.register(span)
            pair.target.unregister(span)
        pair.target.register(span)
        pair.source.register(span)
        pair.source.write(0, b"again")
        pair.submit(pair.connect(), (0, 0, 5)).wait(self.timeout)
        assert pair.target.read(0, 5) == b"again"

    @pytest.mark.parametrize("other", ["same", "shorter", "longer", "contained", "overlapping"])
    def test_an_overlap_is_refused_and_the_first_region_stays(self, pair: Pair, other: str) -> None:
        half = self.backed_bytes // 2
        spans = {
            "same": (0, half),
            "shorter": (0, half // 2),
            "longer": (0, 2 * half),
            "contained": (half // 4, half // 4),
            "overlapping": (half // 2, half),
        }
        pair.target.register((0, half))
        with pytest.raises(RegistrationError) as refused:
            pair.target.register(spans[other])
        assert refused.value.region == (pair.target.base + spans[other][0], spans[other][1])
        self._still_usable(pair, 0, half)
        pair.target.unregister((0, half))

    def test_one_call_registers_all_or_nothing(self, pair: Pair) -> None:
        quarter = self.backed_bytes // 4
        pair.target.register((0, quarter))
        with pytest.raises(RegistrationError):
            pair.target.register((2 * quarter, quarter), (quarter // 2, quarter))
        pair.target.register((2 * quarter, quarter))
        with pytest.raises(RegistrationError):
            pair.target.register((3 * quarter, 4096), (3 * quarter, 4096))
        pair.target.register((3 * quarter, 4096))

    def test_one_call_unregisters_all_or_nothing(self, pair: Pair) -> None:
        quarter = self.backed_bytes // 4
        pair.target.register((0, quarter))
        with pytest.raises(RegistrationError):
            pair.target.unregister((0, quarter), (2 * quarter, quarter))
        with pytest.raises(RegistrationError):
            pair.target.unregister((0, quarter), (0, quarter))
        self._still_usable(pair, 0, quarter)
        pair.target.unregister((0, quarter))
        pair.target.register((0, 2 * quarter))

    def test_adjacent_regions_are_both_usable(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        pair.target.register((0, half), (half, half))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, _pattern(1, self.backed_bytes))
        peer = pair.connect()
        pair.submit(peer, (half - 64, half - 64, 64), (half, half, 64)).wait(self.timeout)
        assert pair.target.read(half - 64, 128) == _pattern(1, self.backed_bytes)[half - 64 : half + 64]

    def test_a_copy_across_a_seam_arrives_or_is_refused(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        pair.target.register((0, half), (half, half))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, _pattern(1, self.backed_bytes))
        peer = pair.connect()
        try:
            pair.submit(peer, (half - 64, half - 64, 128)).wait(self.timeout)
        except TransferFailed:
            assert not pair.source.engine.capabilities.crosses_seams
            assert pair.target.read(half, 64) == bytes(64)
        else:
            assert pair.target.read(half - 64, 128) == _pattern(1, self.backed_bytes)[half - 64 : half + 64]

    @pytest.mark.parametrize("unknown", ["never", "inside", "longer", "shorter"])
    def test_what_was_not_registered_is_not_unregistered(self, pair: Pair, unknown: str) -> None:
        half = self.backed_bytes // 2
        spans = {
            "never": (half, half),
            "inside": (4096, half - 4096),
            "longer": (0, 2 * half),
            "shorter": (0, 4096),
        }
        pair.target.register((0, half))
        with pytest.raises(RegistrationError) as refused:
            pair.target.unregister(spans[unknown])
        assert refused.value.unknown
        self._still_usable(pair, 0, half)
        pair.target.unregister((0, half))

    def test_an_empty_region_is_refused(self, pair: Pair) -> None:
        with pytest.raises(RegistrationError):
            pair.target.register((0, 0))
        pair.target.register((0, self.backed_bytes))

    def test_memory_that_is_not_backed_is_never_registered(self, pair: Pair) -> None:
        with pytest.raises(RegistrationError, match="past backed"):
            pair.target.move_ledger(nbytes=self.reserved_bytes, past_backed="refuse")
        assert pair.target.registered() == []
        pair.target.move_ledger(nbytes=self.reserved_bytes)
        assert sum(nbytes for _, nbytes in pair.target.registered()) == self.backed_bytes
        if pair.source.engine.capabilities.detects_unmapped:
            with pytest.raises(RegistrationError):
                pair.target.register((self.backed_bytes, self.reserved_bytes - self.backed_bytes))

    def test_a_write_outside_what_is_registered_is_refused(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        pair.target.register((0, half))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, b"x" * self.backed_bytes)
        peer = pair.connect()
        with pytest.raises(TransferFailed):
            pair.submit(peer, (0, half, 4096)).wait(self.timeout)
        assert pair.target.read(half, half) == bytes(half)

    def test_nothing_is_written_after_unregistering(self, ready: Pair) -> None:
        ready.connect()
        ready.target.move_ledger(nbytes=0)
        with pytest.raises(TransferFailed):
            ready.submit(ready.connect(), (0, 0, 4096)).wait(self.timeout)
        assert ready.target.read(0, self.backed_bytes) == _pattern(2, self.backed_bytes)

    def test_growth_is_usable_after_connecting_again(self, ready: Pair) -> None:
        first = ready.connect()
        epoch = ready.target.move_ledger(live=True)
        ready.target.grow(self.reserved_bytes)
        assert ready.target.move_ledger(live=True) > epoch
        assert sum(nbytes for _, nbytes in ready.target.registered()) == self.reserved_bytes
        peer = ready.connect()
        assert peer == first
        num_pages = self.backed_bytes // self.page_bytes
        dst = np.arange(num_pages // 2, num_pages // 2 + num_pages)
        plan = plan_page_copies(
            ready.source.base,
            np.arange(num_pages),
            ready.target.base,
            dst,
            self.page_bytes,
            src_seams=ready.source.seams(),
            dst_seams=ready.target.seams(),
        )
        ready.source.engine.submit(peer, *plan).wait(self.timeout)
        start = num_pages // 2 * self.page_bytes
        assert ready.target.read(start, self.backed_bytes) == _pattern(1, self.backed_bytes)
        assert ready.target.read(0, start) == _pattern(2, self.backed_bytes)[:start]

    def test_a_peer_that_died_is_reported_and_its_successor_is_reached(self, ready: Pair) -> None:
        peer = ready.connect()
        ready.submit(peer, (0, 0, 4096)).wait(self.timeout)
        if isinstance(ready.target, RemoteHost):
            ready.target.process.kill()
        else:
            ready.target.close()
        with pytest.raises((TransferFailed, TransferTimeout)):
            ready.submit(peer, (0, 0, self.backed_bytes)).wait(self.timeout)
        ready.source.engine.disconnect(peer)
        ready.target = ready.make_target()
        ready.target.move_ledger()
        ready.submit(ready.connect(), (0, 0, self.backed_bytes)).wait(self.timeout)
        assert ready.target.read(0, self.backed_bytes) == _pattern(1, self.backed_bytes)

    def test_an_unknown_peer_is_refused(self, ready: Pair) -> None:
        with pytest.raises(TransferFailed):
            ready.submit("nobody", (0, 0, 16)).wait(self.timeout)
        ready.source.engine.disconnect("nobody")
        peer = ready.connect()
        ready.source.engine.disconnect(peer)
        with pytest.raises(TransferFailed):
            ready.submit(peer, (0, 0, 16)).wait(self.timeout)
        ready.submit(ready.connect(), (0, 0, 16)).wait(self.timeout)

    def test_a_description_of_something_else_is_refused(self, ready: Pair) -> None:
        for description in (b"", b"no description", b"\xff\x00" * 20):
            with pytest.raises(TransferFailed):
                ready.source.engine.connect(description)
        ready.submit(ready.connect(), (0, 0, 16)).wait(self.timeout)

    def test_a_closed_engine_refuses_and_closes_again(self, ready: Pair) -> None:
        cls = type(self)
        source = EngineHost(cls.engine_factory, cls.memory_factory, cls.reserved_bytes, cls.backed_bytes)
        source.move_ledger()
        pair = Pair(source, ready.target, ready.make_target)
        peer = pair.connect()
        pair.submit(peer, (0, 0, 16)).wait(self.timeout)
        source.engine.close()
        source.engine.close()
        with pytest.raises(TransferFailed):
            pair.submit(peer, (0, 0, 16)).wait(self.timeout)
        with pytest.raises(RegistrationError):
            source.register((0, 4096))
        source.close()

    def test_engines_that_were_closed_leave_nothing(self) -> None:
        cls = type(self)
        args = (cls.engine_factory, cls.memory_factory, cls.reserved_bytes, cls.backed_bytes)

        def once() -> None:
            host = EngineHost(*args)
            host.move_ledger()
            host.close()

        once()  # what a library loads or starts once is no leak
        before = leftovers()
        for _ in range(3):
            once()
        grown = [after - past for after, past in zip(_settled(before), before, strict=True)]
        assert all(more <= most for more, most in zip(grown, cls.leak_allowance, strict=True)), grown

    def _still_usable(self, pair: Pair, offset: int, nbytes: int) -> None:
        """A write to the first and last bytes of the span arrives."""
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, _pattern(1, 128))
        peer = pair.connect()
        last = offset + nbytes - 64
        pair.submit(peer, (0, offset, 64), (64, last, 64)).wait(self.timeout)
        assert pair.target.read(offset, 64) + pair.target.read(last, 64) == _pattern(1, 128)


def _pattern(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def _some_pages(num_pages: int, seed: int) -> list[int]:
    """Half of all pages in random order, but for one long run."""
    run = num_pages // 4
    rest = [page for page in range(num_pages) if not seed <= page < seed + run]
    return [*range(seed, seed + run), *random.Random(seed).sample(rest, run)]


def _ends(pending: Pending, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not pending.done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _settled(before: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is left once threads that are ending have ended."""
    deadline = time.monotonic() + 5
    while (after := leftovers())[2] > before[2] and time.monotonic() < deadline:
        time.sleep(0.02)
    return after
