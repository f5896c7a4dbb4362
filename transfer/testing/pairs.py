"""Fixtures for a pair of engines, one of them in another process."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest
from kvarena.transfer.protocol import Pending
from kvarena.transfer.testing.hosts import EngineFactory, EngineHost, MemoryFactory, RemoteHost, Sides
from kvarena.transfer.testing.memory import HostMemory

__all__ = ["EnginePairs", "Pair", "ends", "pattern", "some_pages"]

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


class EnginePairs:
    """What the tests of the contract run on; to be inherited."""

    engine_factory: ClassVar[EngineFactory]
    """Importable by its name from another process, unless `in_process`."""
    memory_factory: ClassVar[MemoryFactory] = HostMemory
    in_process: ClassVar[bool] = False
    """The engine only reaches engines of its own process."""
    reuses_engines: ClassVar[bool] = False
    """One pair of engines serves all tests, each with new memory: for engines that are slow to close."""
    reserved_bytes: ClassVar[int] = 4 * MIB
    backed_bytes: ClassVar[int] = 2 * MIB
    page_bytes: ClassVar[int] = 16384
    timeout: ClassVar[float] = 20.0
    """Seconds within which a transfer of a few MiB ends, a dead peer is noticed, and an engine closes."""
    leak_allowance: ClassVar[tuple[int, int, int]] = (2, 16, 0)
    """Descriptors, mappings and threads by which three engines or eight connections may change a process."""

    @classmethod
    def make_host(cls) -> EngineHost:
        """An engine and its memory, in this process."""
        return EngineHost(cls.engine_factory, cls.memory_factory, cls.reserved_bytes, cls.backed_bytes)

    @contextlib.contextmanager
    def another_host(self) -> Iterator[EngineHost]:
        """One more, which is closed in the end; that fails if it takes longer than `timeout`."""
        host = self.make_host()
        try:
            yield host
        finally:
            _close(host, self.timeout)

    @pytest.fixture
    def pair(self, kvarena_sides: Sides) -> Iterator[Pair]:
        """A source here and a target there, nothing registered."""
        cls, sides = type(self), kvarena_sides
        # Of another size: nothing may take its own arena for the peer's.
        args = (cls.engine_factory, cls.memory_factory, 2 * cls.reserved_bytes, cls.backed_bytes)
        made: list[EngineHost | RemoteHost] = []

        def make_target() -> EngineHost | RemoteHost:
            made.append(EngineHost(*args) if cls.in_process else RemoteHost(sides.process(), *args))
            return made[-1]

        if cls.reuses_engines:
            if sides.source is None:
                sides.source = cls.make_host()
            if sides.target is None or (
                isinstance(sides.target, RemoteHost) and not sides.target.process.alive
            ):
                sides.target = make_target()
            pair = Pair(sides.source, sides.target, make_target)
            yield pair
            sides.source.renew()
            sides.target = pair.target
            sides.target.renew()
        else:
            source = cls.make_host()
            made.append(source)
            try:
                yield Pair(source, make_target(), make_target)
            finally:
                _close_all(made, cls.timeout)

    @pytest.fixture
    def ready(self, pair: Pair) -> Pair:
        """A pair whose ledgers hold all backed memory, filled with different bytes on each side."""
        pair.source.move_ledger()
        pair.target.move_ledger()
        pair.source.write(0, pattern(1, self.backed_bytes))
        pair.target.write(0, pattern(2, self.backed_bytes))
        return pair


@functools.cache
def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that no other seed gives."""
    return random.Random(seed).randbytes(nbytes)


def some_pages(num_pages: int, seed: int) -> list[int]:
    """Half of all pages in random order, but for one long run."""
    run = num_pages // 4
    rest = [page for page in range(num_pages) if not seed <= page < seed + run]
    return [*range(seed, seed + run), *random.Random(seed).sample(rest, run)]


def ends(pending: Pending, timeout: float) -> bool:
    """Poll until it has ended."""
    deadline = time.monotonic() + timeout
    while not pending.done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _close_all(hosts: Sequence[EngineHost | RemoteHost], timeout: float) -> None:
    """Close each, though another fails; an engine here gets so many seconds, and else keeps its memory.

    pytest-timeout does not help with this: it no longer looks at a test that has failed already.
    """
    with contextlib.ExitStack() as stack:
        for host in reversed(hosts):  # the stack begins with the last
            stack.callback(_close, host, timeout)


def _close(host: EngineHost | RemoteHost, timeout: float) -> None:
    if isinstance(host, EngineHost):
        failures: list[Exception] = []

        def close() -> None:
            try:
                host.engine.close()
            except Exception as error:  # noqa: BLE001 - raised in the test's thread
                failures.append(error)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        thread.join(timeout)
        assert not thread.is_alive(), f"{host.engine.name}: close() did not end within {timeout:g} s"
        for failure in failures:
            raise failure
    host.close()
