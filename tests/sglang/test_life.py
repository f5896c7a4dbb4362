"""A life inside SGLang is the life of any pool: the contract, over each release's own pools."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
from kvarena.hooks import hookimpl
from kvarena.plugin.engines.sglang.engine_memory import EngineMemory
from kvarena.plugin.engines.sglang.registration import KvRegistration
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.life_contract import LifeContract, SampleLife
from kvarena.pool import HostVmm
from kvarena.pool.testing import FailingDriver
from kvarena.transfer import Region, RegistrationError

pytestmark = pytest.mark.sglang

FREE, GRANULE = 40_000, 4096


class Life(SampleLife):
    """SGLang's pool, its own resize, a KV manager's registration and a plugin."""

    def __init__(self, rig: Any, rig_module: Any, runner_module: Any) -> None:
        self._rig, self._rig_module, self._runner_module = rig, rig_module, runner_module
        self.driver = FailingDriver(HostVmm(memory_limit=1 << 20))
        self.held: dict[int, int] = {}
        self.stuck = False
        self._engine_fails = self._plugin_fails = 0
        rig.use_driver(self.driver)
        rig.plug(self)

    def start(self, step: str) -> None:
        self.bundle = self._rig.reserved(256, 128)
        self.bound = self.bundle.bound
        self.runner = self._runner_module.runner(
            self._rig, self._rig_module, self.bundle, page_size=4, free_bytes=FREE
        )
        engine = EngineMemory("double", self._register, self._unregister)
        base, nbytes = self.bound.arena.base, self.bound.active_allocation_bytes
        self.kv_args = type("KVArgs", (), {"kv_data_ptrs": [base], "kv_data_lens": [nbytes]})()
        self.registration = KvRegistration(self.bound, self.kv_args, engine, lambda memory: engine)

    def take(self, step: str) -> None:
        self._runner_module.resize(self.runner)

    def fail(self, who: str, number: int) -> None:
        if who == "driver":
            self.driver.fail_at = number or None
        elif who == "engine":
            self._engine_fails = number
        else:
            self._plugin_fails = number

    def state(self) -> object:
        arena = self.bound.arena
        assert all(n <= arena.backed_bytes for n in self.held.values())
        assert self.held == {region.address: region.nbytes for region in self.registration.ledger.regions}
        return (
            self._rig_module.scalars(self.bundle),
            vars(self.runner.memory_pool_config).copy(),
            self.runner.max_total_num_tokens,
            [mapping.nbytes for mapping in arena.mappings],
            self.bound.active_allocation_bytes,
            dict(self.held),
            list(self.kv_args.kv_data_lens),
            self.bound.observer.reporter.pool_status().tokens,
        )

    def hold(self, stuck: bool) -> None:
        self.stuck = stuck

    def registered_bytes(self) -> int:
        return sum(self.held.values())

    def backed_bytes(self) -> int:
        return int(self.bound.arena.backed_bytes)

    def close(self) -> None:
        self.bound.close()

    @hookimpl
    def kvarena_pool_reserved(self) -> None:
        self._hear()

    @hookimpl
    def kvarena_pool_resizing(self) -> None:
        self._hear()

    @hookimpl
    def kvarena_pool_finalized(self) -> None:
        self._hear()

    @hookimpl
    def kvarena_pool_closing(self) -> None:
        self._hear()

    def _hear(self) -> None:
        self._plugin_fails -= 1
        if self._plugin_fails == 0:
            raise ZeroDivisionError("told to")

    def _register(self, region: Region) -> int:
        self._count(region)
        self.held[region.address] = region.nbytes
        return region.address

    def _unregister(self, address: int, region: Region) -> None:
        if self.stuck:
            raise RegistrationError("double", region, -202)
        self._count(region)
        del self.held[address]

    def _count(self, region: Region) -> None:
        self._engine_fails -= 1
        if self._engine_fails == 0:
            raise RegistrationError("double", region, -9)


class TestLife(LifeContract):
    """Finalize and close; SGLang's pools do not grow."""

    @pytest.fixture
    def life(
        self, rig: Any, rig_module: Any, runner_module: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Life]:
        monkeypatch.setattr(
            runtime, "settings", msgspec.structs.replace(runtime.settings, finalize_retries=0)
        )
        rig.release.publish(page_size=4, enable_unified_memory=True, swa_full_tokens_ratio=0.8)
        made = Life(rig, rig_module, runner_module)
        yield made
        for who in ("driver", "engine", "plugin"):
            made.fail(who, 0)
        made.close()
        assert made.driver.outstanding() == []
