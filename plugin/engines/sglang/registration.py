"""KV managers register through our ledger: backed bytes only, each once, and no failure unnoticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, final

from kvarena.hooks.ledgers import Follower
from kvarena.plugin.closing import failures_of, raise_first
from kvarena.plugin.engines.sglang.bound import SglangPool
from kvarena.plugin.engines.sglang.engine_memory import of_nixl_agent
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.engines.sglang.same_host import mooncake_hooks as same_host
from kvarena.pool.transaction import add_note
from kvarena.transfer import MooncakeEngine, Region, RegistrationLedger, TransferEngine

__all__ = [
    "Buffer",
    "KvRegistration",
    "deregister_mooncake",
    "register_mooncake",
    "register_nixl",
    "register_staging",
]

_ATTRIBUTE = "_kvarena_registration"
_STAGING = "_kvarena_staging"
_KINDS = ("kv", "aux", "state")


class Buffer(NamedTuple):
    """One entry of SGLang's ``KVArgs``."""

    region: Region
    memory: str = "VRAM"
    """NIXL's word for where it lies."""


def register_mooncake(original: Callable[[Any], None], self: Any) -> None:
    """Around ``MooncakeKVManager.register_buffer_to_engine``; stock looks at no return code."""
    bound = _arena_of(self.kv_args)
    if bound is None:
        original(self)
        return
    if _is_registered(self, bound):
        return
    host = str(self.engine.hostname)
    engine = MooncakeEngine(host, transfer_engine=self.engine.engine)
    # Aux buffers are registered with the same engine; it keeps them apart by address.
    registration = KvRegistration(bound, self.kv_args, engine, lambda memory: engine)
    setattr(self, _ATTRIBUTE, registration)
    for region in getattr(self, _STAGING, ()):
        registration.add(region)
    same_host.start_transfers(self, bound, registration.ledger)


def register_staging(original: Callable[[Any, int, int], None], self: Any, ptr: int, size: int) -> None:
    """Around ``MooncakeKVManager._register_staging_memory``, which follows the registration of buffers.

    Stock looks at no return code, and never takes the buffer back: after a role switch, its addresses
    may be another buffer's, which is then refused.
    """
    registration: KvRegistration | None = getattr(self, _ATTRIBUTE, None)
    if registration is None:
        original(self, ptr, size)
        return
    region = Region(int(ptr), int(size))
    registration.add(region)
    # A manager that unregisters and registers again keeps its staging buffers.
    setattr(self, _STAGING, [*getattr(self, _STAGING, ()), region])


def deregister_mooncake(original: Callable[[Any], None], self: Any) -> None:
    """Around ``deregister_buffer_to_engine``: what the ledger holds, by the very addresses it registered.

    Stock computes the list again, and one address that the engine does not hold blocks all others for
    the engine's life. What else stock does here, it does still.
    """
    registration: KvRegistration | None = getattr(self, _ATTRIBUTE, None)
    if registration is None:
        original(self)
        return
    try:
        same_host.stop_transfers(self)
    finally:
        # What the same-host path still holds keeps the memory, not Mooncake's registrations.
        registration.close()
        setattr(self, _ATTRIBUTE, None)
    kv_args = self.kv_args
    self.kv_args = _without_buffers(kv_args)
    try:
        original(self)
    finally:
        self.kv_args = kv_args


def register_nixl(original: Callable[[Any], None], self: Any) -> None:
    """Around ``NixlKVManager.register_buffer_to_engine``; stock registers the arena once for each alias."""
    bound = _arena_of(self.kv_args)
    if bound is None:
        original(self)
        return
    if _is_registered(self, bound):
        return
    gpu = int(self.kv_args.gpu_id)
    engines = {
        memory: of_nixl_agent(self.agent, memory, gpu if memory == "VRAM" else 0)
        for memory in ("VRAM", "DRAM")
    }
    arena = next(b.memory for b in _buffers(self.kv_args) if runtime.pool_at(b.region.address) is bound)
    registration = KvRegistration(bound, self.kv_args, engines[arena], engines.__getitem__)
    setattr(self, _ATTRIBUTE, registration)
    # Read by nobody, but where stock leaves them.
    self.kv_descs = engines["VRAM"].descriptors
    self.aux_descs = engines["DRAM"].descriptors
    self.state_descs = []


@final
class KvRegistration(Follower):
    """What one KV manager has registered: the arena in one ledger, every other buffer in others.

    Parameters
    ----------
    bound : SglangPool
        Whose arena some of the buffers lie in.
    kv_args : KVArgs
        SGLang's list of buffers; its lengths follow the pool.
    engine : TransferEngine
        For the arena.
    engine_for : callable
        NIXL's word for a memory kind to the engine that registers it.
    """

    def __init__(
        self,
        bound: SglangPool,
        kv_args: Any,
        engine: TransferEngine,
        engine_for: Callable[[str], TransferEngine],
    ) -> None:
        self.bound = bound
        self.others: list[RegistrationLedger] = []
        self._kv_args = kv_args
        self._engine_for = engine_for
        self.ledger = bound.keeper.add(engine, self, register=False)
        try:
            self._register_others()
            with bound.announce.noting_registrations():
                bound.keeper.register(self.ledger)
        except BaseException as error:
            for second in failures_of(self.close, "the registration"):
                add_note(error, f"this failed too: {second}")
            raise

    def add(self, region: Region) -> None:
        """Register one more buffer that is not in the arena.

        Raises
        ------
        RegistrationError
            The engine refused it.
        """
        self._register_other([region], region, "VRAM")

    @property
    def stands(self) -> bool:
        """Whether it follows the pool: it was not closed, or an engine would not let go."""
        return self.ledger in self.bound.ledgers

    def moved(self, ledger: RegistrationLedger) -> None:
        """Let SGLang's lists say what is backed now."""
        self._correct_lengths()

    def closing(self, ledger: RegistrationLedger) -> None:
        """Let go of what is not in the arena, too."""
        raise_first(
            [failure for each in self.others for failure in failures_of(each.clear, each.engine.name)]
        )

    def details(self) -> dict[str, Any]:
        """Bytes of the buffers outside the arena."""
        return {"others": self._other_bytes()}

    def close(self) -> None:
        """Unregister everything, also what is not in the arena; a second call does nothing.

        Raises
        ------
        RegistrationError
            The engine refused. What it still holds is tried again when the pool is closed, and the memory
            stays until then.
        """
        held, began = self.ledger.registered_bytes, time.perf_counter()
        failures = failures_of(self.ledger.clear, self.ledger.engine.name)
        for ledger in self.others:
            failures += failures_of(ledger.clear, ledger.engine.name)
        raise_first(failures)
        if held:
            self.bound.announce.note("unregistered", self.ledger, (time.perf_counter() - began) * 1e3)
        self.bound.keeper.remove(self.ledger)

    def _other_bytes(self) -> int:
        return sum(ledger.registered_bytes for ledger in self.others)

    def _register_others(self) -> None:
        """Aux buffers, and whatever KV or state lies outside the arena; overlaps are registered once."""
        strangers = [
            b for b in _buffers(self._kv_args) if runtime.pool_at(b.region.address) is not self.bound
        ]
        for memory in sorted({buffer.memory for buffer in strangers}):
            regions = [buffer.region for buffer in strangers if buffer.memory == memory]
            start = min(region.address for region in regions)
            span = Region(start, max(region.end for region in regions) - start)
            self._register_other(_apart(regions), span, memory)

    def _register_other(self, regions: list[Region], span: Region, memory: str) -> None:
        ledger = self.bound.keeper.ledger_for(self._engine_for(memory))
        self.others.append(ledger)
        ledger.move_to(regions, backed=span)

    def _correct_lengths(self) -> None:
        """The lengths that SGLang goes on with: NIXL derives from them how many pages it may address."""
        active = self.bound.active_allocation_bytes
        for part in _KINDS:
            for ptrs, lens in _lists(self._kv_args, part):
                for index, ptr in enumerate(ptrs):
                    if ptr == self.bound.arena.base:
                        lens[index] = active


def _is_registered(manager: Any, bound: SglangPool) -> bool:
    """Whether a manager asks again for what it has already.

    SGLang has managers unregister before they release memory and register when it is back, but a NIXL
    manager cannot unregister. Its peers know the first registration, which is still true.
    """
    registration: KvRegistration | None = getattr(manager, _ATTRIBUTE, None)
    return registration is not None and registration.bound is bound and registration.stands


def _arena_of(kv_args: Any) -> SglangPool | None:
    if not runtime.pools:
        return None  # nothing of stock's is looked at, which may have any shape
    found = {id(pool): pool for b in _buffers(kv_args) if (pool := runtime.pool_at(b.region.address))}
    return next(iter(found.values()), None)


def _buffers(kv_args: Any) -> Iterator[Buffer]:
    kinds = getattr(kv_args, "kv_data_mem_kinds", None) or ()
    for part in _KINDS:
        for ptrs, lens in _lists(kv_args, part):
            for index, (ptr, nbytes) in enumerate(zip(ptrs, lens, strict=True)):
                if not ptr or not nbytes:
                    continue  # layers without a buffer keep their place in the lists
                memory = "DRAM" if part == "aux" else "VRAM"
                if part == "kv" and index < len(kinds):
                    memory = kinds[index]
                yield Buffer(Region(int(ptr), int(nbytes)), memory)


def _lists(kv_args: Any, part: str) -> Iterable[tuple[Any, Any]]:
    ptrs = getattr(kv_args, f"{part}_data_ptrs", None) or []
    lens = getattr(kv_args, f"{part}_data_lens", None) or []
    # State components have a list each.
    return zip(ptrs, lens, strict=True) if part == "state" else [(ptrs, lens)]


def _apart(regions: list[Region]) -> list[Region]:
    return sorted(set(regions))


def _without_buffers(kv_args: Any) -> Any:
    empty: dict[str, Any] = {f"{part}_data_{what}": [] for part in _KINDS for what in ("ptrs", "lens")}
    return SimpleNamespace(**{**getattr(kv_args, "__dict__", {}), **empty})
