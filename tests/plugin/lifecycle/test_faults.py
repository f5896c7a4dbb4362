"""Whatever fails, and whenever: what stood before stands after, nothing leaks, and a second try works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from kvarena.errors import KvArenaError
from kvarena.hooks import hookimpl
from kvarena.plugin.composition import make_manager
from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.life_contract import ElasticLifeContract, SampleLife
from kvarena.plugin.lifecycle import PoolLifecycle
from kvarena.pool import (
    DriverError,
    HostVmm,
    MHASubPoolSpec,
    OutOfMemoryError,
    UnifiedSWATokenToKVPoolAllocator,
    resize_for,
)
from kvarena.pool.testing import FailingDriver, no_leaks
from kvarena.transfer import RecordingEngine, Region, RegistrationError
from kvarena.transfer.protocol import Capabilities
from kvarena.transfer.registration.regions import overlapping

MIB = 1 << 20
LIMIT = 16 * MIB
SPECS = (
    MHASubPoolSpec("full", "up", 2, 2, 32, torch.float32),
    MHASubPoolSpec("swa", "down", 3, 2, 32, torch.float32),
)


class Engine(RecordingEngine):
    """Fails at one of its calls; its regions can be replaced only, or also added."""

    def __init__(self, name: str, host: HostVmm, *, live: bool = True) -> None:
        capabilities = Capabilities(crosses_seams=False, spans_handles=True, live_reregistration=live)
        super().__init__(name, capabilities=capabilities, moves_memory=False)
        self.host = host
        self.fail_at = 0
        self.stuck = False
        self.without_memory: list[Region] = []

    def register(self, regions: Sequence[Region]) -> None:
        self._count(regions)
        for region in regions:
            try:
                self.host._check_backed("register", region.address, region.nbytes)
            except DriverError:
                self.without_memory.append(region)
        super().register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        if self.stuck:
            raise RegistrationError(self.name, regions[0], -202)
        self._count(regions)
        super().unregister(regions)

    def _count(self, regions: Sequence[Region]) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise RegistrationError(self.name, regions[0], -9)


class Life(SampleLife):
    """A pool with two engines and a plugin that hears everything, any of which may fail."""

    plugin_name = "third"

    def __init__(self, *, block: tuple[str, ...] = (), transfer: tuple[str, ...] = ()) -> None:
        self.host = HostVmm(memory_limit=LIMIT)
        self.driver = FailingDriver(self.host)
        self.host.unmap = self._unmap  # type: ignore[method-assign]
        self.engines = [Engine("first", self.host), Engine("second", self.host, live=False)]
        self.failing_engine = self.engines[0]
        self.heard: list[tuple[Any, ...]] = []
        self.fail_at = 0
        settings = Settings(
            load_plugins=False, finalize_retries=0, block_plugins=block, transfer=transfer, status=False
        )
        self.manager = make_manager(settings)
        self.manager.register(self, "third")
        self.life = PoolLifecycle(settings, device="cpu", manager=self.manager)

    def start(self, step: str = "") -> None:
        self.reserve(4 * MIB if step in ("grow", "shrink") else 0)
        if step != "finalize":
            assert self.allocator.alloc(64) is not None
        if step == "shrink":
            self.life.grow(6 * MIB, self.allocator)

    def take(self, step: str) -> None:
        if step == "finalize":
            self.finalize(5 * MIB)
        elif step == "grow":
            self.life.grow(7 * MIB + 100, self.allocator)
        else:
            self.life.shrink(4 * MIB, self.allocator)

    def fail(self, who: str, number: int) -> None:
        if who == "driver":
            self.driver.fail_at = number or None
        elif who == "engine":
            self.failing_engine.fail_at = number
        else:
            self.fail_at = number

    def hold(self, stuck: bool) -> None:
        self.failing_engine.stuck = stuck

    def registered_bytes(self) -> int:
        return sum(region.nbytes for region in self.failing_engine.regions)

    def backed_bytes(self) -> int:
        return self.pool.arena.backed_bytes

    def close(self) -> None:
        self.life.close()

    def reserve(self, size: int = 0) -> Life:
        self.pool = self.life.reserve(SPECS, total_bytes=LIMIT, page_size=4)
        self.allocator = UnifiedSWATokenToKVPoolAllocator(self.pool)
        if size:
            self.finalize(size)
        return self

    def finalize(self, size: int) -> None:
        self.life.finalize(resize_for(self.pool, size), self.allocator)

    def state(self) -> tuple[object, ...]:
        pool, allocator = self.pool, self.allocator
        assert allocator.verify_byte_accounting() == []
        for engine, ledger in zip(self.engines, self.life.ledgers, strict=True):
            assert engine.regions == ledger.regions
            assert all(r.address >= pool.arena.base for r in engine.regions)
            assert all(r.end <= pool.arena.base + pool.arena.backed_bytes for r in engine.regions)
        return (
            pool.finalized,
            pool.total_bytes,
            pool.arena.state,
            pool.arena.backed_bytes,
            pool.raw.data_ptr(),
            allocator.full.virtual_to_physical.data_ptr(),
            allocator.available_size(),
            allocator.size_full,
            allocator.size_swa,
            tuple(ledger.registered_bytes for ledger in self.life.ledgers),
            self.life.reporter.pool_status().tokens,
            self.host.free_bytes(),
        )

    @property
    def touched(self) -> tuple[int, int, int]:
        """Calls that anybody beneath or beside the lifecycle got."""
        return len(self.driver.calls), sum(len(engine.calls) for engine in self.engines), len(self.heard)

    @hookimpl
    def kvarena_driver(self, device: object) -> object:
        return self.driver

    @hookimpl
    def kvarena_transfer_engines(self, config: object) -> object:
        return self.engines

    @hookimpl
    def kvarena_pool_reserved(self, pool: object) -> None:
        self._hear("reserved")

    @hookimpl
    def kvarena_pool_resizing(self, pool: object, keep_bytes: int) -> None:
        self._hear("resizing", keep_bytes)

    @hookimpl
    def kvarena_pool_finalized(self, pool: Any, resize: Any) -> None:
        self._hear("finalized", pool.total_bytes, resize.unified_memory_pool_bytes)

    @hookimpl
    def kvarena_pool_closing(self, pool: object) -> None:
        self._hear("closing")

    def _unmap(self, address: int, nbytes: int) -> None:
        gone = Region(address, nbytes)
        for engine in self.engines:
            if overlapping(gone, engine.regions):
                engine.without_memory.append(gone)
        HostVmm.unmap(self.host, address, nbytes)

    def _hear(self, *what: object) -> None:
        self.heard.append(what)
        self.fail_at -= 1
        if self.fail_at == 0:
            raise ZeroDivisionError(str(what))


@pytest.fixture
def life() -> Iterator[Life]:
    # What torch and the first allocator make only once is paid for before leaks are looked for.
    first = Life().reserve(4 * MIB)
    first.life.close()
    made = Life()
    with no_leaks():
        yield made
        made.life.close()
    assert made.driver.outstanding() == []
    assert made.host.live_bytes == 0
    assert [engine.without_memory for engine in made.engines] == [[], []]


@pytest.mark.parametrize("which", [0, 1], ids=["first engine", "second engine"])
class TestLife(ElasticLifeContract):
    """The contract, with the calls of either engine failing."""

    @pytest.fixture
    def life(self, life: Life, which: int) -> Life:
        life.failing_engine = life.engines[which]
        return life


@pytest.mark.parametrize("size", [None, True, 1, 4 * MIB, 5 * MIB, 6 * MIB, 8 * MIB, LIMIT + 1])
def test_a_size_that_cannot_be_disturbs_nobody(life: Life, size: Any) -> None:
    # Regions were taken from engines, under the peers' transfers, before the size was looked at.
    life.reserve(4 * MIB)
    life.life.grow(6 * MIB, life.allocator)
    before, touched = life.state(), life.touched
    resize = resize_for(life.pool, 5 * MIB)
    tries = [lambda: life.life.finalize(resize, life.allocator)]
    if size != 4 * MIB:
        tries.append(lambda: life.life.shrink(size, life.allocator))
    if size != 8 * MIB:
        tries.append(lambda: life.life.grow(size, life.allocator))
    for attempt in tries:
        with pytest.raises(KvArenaError):
            attempt()
    assert life.touched == touched
    assert life.state() == before


def test_everyone_hears_which_size_stands_after_a_failed_growth(life: Life) -> None:
    life.reserve(4 * MIB)
    life.fail_at = 1
    with pytest.raises(KvArenaError, match="ZeroDivisionError"):
        life.life.grow(6 * MIB, life.allocator)
    assert life.heard[-3:] == [
        ("finalized", 6 * MIB, 6 * MIB),
        ("resizing", 4 * MIB),
        ("finalized", 4 * MIB, 4 * MIB),
    ]


def test_regions_in_use_stay_when_another_engine_refuses_the_growth(life: Life) -> None:
    # The engine before the one that failed was emptied and filled again, under the peers' transfers.
    life.reserve(4 * MIB)
    first, second = life.engines
    held, calls = first.regions, len(first.calls)
    second.fail_at = 2
    with pytest.raises(RegistrationError):
        life.life.grow(6 * MIB, life.allocator)
    assert first.regions == held
    assert not [call for call in first.calls[calls:] if held[0] in call.detail]  # type: ignore[operator]


def test_what_has_no_memory_is_not_registered_even_when_nothing_can_be_undone(life: Life) -> None:
    life.reserve()
    life.fail_at = 2  # in kvarena_pool_finalized
    life.driver._ops, life.driver._forever = frozenset({"create"}), True
    life.driver._error = OutOfMemoryError("create", "ENOMEM", requested=MIB, free=0)
    life.driver.fail_at = 2  # the new size's is the last that can be made: the sink cannot come back
    with pytest.raises(KvArenaError, match="ZeroDivisionError") as caught:
        life.finalize(5 * MIB)
    assert any("backing the sink alone again failed too" in note for note in caught.value.__notes__)
    assert (life.pool.arena.backed_bytes, [engine.regions for engine in life.engines]) == (0, [(), ()])
    life.driver.fail_at = None


@pytest.mark.parametrize("number", range(1, 6))
def test_a_close_that_fails_is_finished_by_the_next(life: Life, number: int) -> None:
    # The pool was forgotten before it was closed, so a second call found nothing to do.
    life.reserve(4 * MIB)
    life.life.grow(6 * MIB, life.allocator)
    life.driver.fail_at = number
    with pytest.raises(KvArenaError, match=f"call {number}"):
        life.life.close()
    life.driver.fail_at = None
    life.life.close()
    assert (life.host.live_bytes, life.life.pool) == (0, None)


def test_a_strangers_engine_may_raise_anything_when_closed(life: Life) -> None:
    life.reserve(4 * MIB)

    def stumble() -> None:
        raise RuntimeError("the socket is gone")

    life.engines[0].close = stumble  # type: ignore[method-assign]
    with pytest.raises(KvArenaError, match=r"'first' could not be closed: RuntimeError: the socket is gone"):
        life.life.close()
    assert life.host.live_bytes == 0
    assert life.engines[1].calls[-1].op == "close"


@pytest.mark.parametrize("transfer", ["pigeon", "same-host"])
def test_engines_are_closed_when_a_later_answer_fails(transfer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object) -> object:
        raise KvArenaError("no such socket")

    monkeypatch.setattr("kvarena.hooks.defaults._ENGINES", {"same-host": refuse})
    life = Life(transfer=(transfer,))
    with pytest.raises(KvArenaError, match=r"pigeon|no such socket"):
        life.reserve()
    assert [engine.calls[-1].op for engine in life.engines] == ["close", "close"]
    assert life.host.live_bytes == 0


def test_what_kvarena_needs_of_itself_cannot_be_blocked_in_silence() -> None:
    life = Life(block=("kvarena-ledgers",))
    with pytest.raises(ConfigError, match=r"registrations.*KVARENA_BLOCK_PLUGINS"):
        life.reserve()
    assert (life.host.live_bytes, life.life.pool, life.life.ledgers) == (0, None, ())
    assert [engine.calls[-1].op for engine in life.engines] == ["close", "close"]
    life = Life(block=("kvarena-budget",)).reserve()
    with pytest.raises(ConfigError, match=r"how large.*KVARENA_BLOCK_PLUGINS"):
        life.life.budget()
    life.life.close()
