"""HiCache's direct linkers register device memory with a store: clipped to what is backed.

Stock registers the whole storage behind each tensor, which for an arena is its whole reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from kvarena.plugin.engines.sglang.engine_memory import EngineMemory, of_mooncake_store, of_umbp_client
from kvarena.plugin.engines.sglang.registration import KvRegistration
from kvarena.plugin.engines.sglang.runtime import runtime

__all__ = ["register_mooncake_linker", "register_umbp_linker"]


def register_mooncake_linker(original: Callable[[Any], None], self: Any) -> None:
    """Around ``MooncakeDirectLinker.register_buffers``."""
    if not _through_ledger(self, lambda: of_mooncake_store(self.storage.store)):
        original(self)


def register_umbp_linker(original: Callable[[Any], None], self: Any) -> None:
    """Around ``UMBPDirectLinker._register_buffers``; it keeps a list of what it registered."""
    if not _through_ledger(self, lambda: of_umbp_client(self.storage.client)):
        original(self)
        return
    registration: KvRegistration = self._kvarena_registration
    ledgers = (registration.ledger, *registration.others)
    self._registered = [tuple(region) for ledger in ledgers for region in ledger.regions]


def _through_ledger(linker: Any, make_engine: Callable[[], EngineMemory]) -> bool:
    if not runtime.pools:
        return False
    buffers = dict.fromkeys(_storages(linker))
    bound = next((pool for ptr, _ in buffers if (pool := runtime.pool_at(ptr)) is not None), None)
    if bound is None:
        return False
    engine = make_engine()
    listed = SimpleNamespace(kv_data_ptrs=[ptr for ptr, _ in buffers], kv_data_lens=[n for _, n in buffers])
    linker._kvarena_registration = KvRegistration(bound, listed, engine, lambda memory: engine)
    return True


def _storages(linker: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of the storage behind each buffer, as SGLang lists them."""
    for pool in linker.pools.values():
        for buffer in pool.get_hybrid_pool_buffer():
            storage = buffer.untyped_storage()
            yield int(storage.data_ptr()), int(storage.nbytes())
