"""Reads a pool's state as it is now: the one source of the status file, the gauges and the picture."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvarena.plugin.observe.status.model import EngineStatus, PoolState, PoolStatus, Sample, SubPoolStatus
from kvarena.plugin.observe.status.usage import PageUsage

if TYPE_CHECKING:
    from kvarena.pool import PostCaptureKVResize, SubPoolSpec, UnifiedPool
    from kvarena.transfer import RegistrationLedger

__all__ = ["collect", "sample"]

_MAX_HANDLES = 64
"""Handles that a sample lists one by one."""


def collect(
    pool: UnifiedPool | None,
    ledgers: Iterable[RegistrationLedger] = (),
    *,
    usage: Mapping[str, PageUsage] | None = None,
    resize: PostCaptureKVResize | None = None,
) -> PoolStatus:
    """The state of one pool.

    Parameters
    ----------
    pool : UnifiedPool or None
        None: not reserved yet, or closed.
    ledgers : iterable of RegistrationLedger
        One for each transfer engine.
    usage : mapping, optional
        Live and free pages of the sub-pools, where they are known.
    resize : PostCaptureKVResize, optional
        What the pool was finalized to; its tokens are the ones that the engine serves.
    """
    if pool is None:
        return PoolStatus(state="planned")
    usage = usage or {}
    sub_pools = tuple(_sub_pool(pool, spec, usage.get(spec.name)) for spec in pool.sub_pool_specs)
    tokens, requests = _capacity(sub_pools, resize)
    arena = pool.arena
    return PoolStatus(
        state=_state(pool),
        device=str(pool.device),
        driver=pool.driver.name,
        base=arena.base,
        reserved_bytes=arena.reserved_bytes,
        backed_bytes=arena.backed_bytes,
        active_bytes=pool.active_allocation_bytes,
        sink_bytes=pool.sink_bytes,
        handle_bytes=tuple(mapping.nbytes for mapping in arena.mappings),
        page_size=pool.page_size,
        tokens=tokens,
        requests=requests,
        torch_cached_bytes=_torch_cached_bytes(str(pool.device)),
        sub_pools=sub_pools,
        engines=tuple(_engine(ledger, arena.base) for ledger in ledgers),
    )


def sample(
    at_s: float,
    pool: UnifiedPool | None,
    ledgers: Iterable[RegistrationLedger],
    usage: Mapping[str, PageUsage],
) -> Sample:
    """One moment of an arena's history; cheaper than `collect`."""
    if pool is None:
        return Sample(at_s, 0, 0, 0, (), ())
    handles = tuple(mapping.nbytes for mapping in pool.arena.mappings)
    live = [usage.get(spec.name, PageUsage(0, 0)).live for spec in pool.sub_pool_specs]
    return Sample(
        at_s,
        pool.arena.backed_bytes,
        min(pool.active_allocation_bytes, pool.arena.backed_bytes),
        max((ledger.registered_bytes for ledger in ledgers), default=0),
        # Hundreds of samples are written every second, and a pool may have thousands of handles.
        _listed(handles),
        tuple(
            pages * pool.page_bytes(spec.name) for pages, spec in zip(live, pool.sub_pool_specs, strict=True)
        ),
        len(handles),
    )


def _listed(handles: tuple[int, ...]) -> tuple[int, ...]:
    if len(handles) <= _MAX_HANDLES:
        return handles
    return (*handles[: _MAX_HANDLES - 1], sum(handles[_MAX_HANDLES - 1 :]))


def _state(pool: UnifiedPool) -> PoolState:
    if not pool.post_capture_active:
        return "eager"
    return "serving" if pool.finalized else "reserved"


def _sub_pool(pool: UnifiedPool, spec: SubPoolSpec, usage: PageUsage | None) -> SubPoolStatus:
    slots = pool.slots_per_page(spec.name)
    return SubPoolStatus(
        name=spec.name,
        unit="requests" if _holds_states(spec) else "tokens",
        grow_direction=spec.grow_direction,
        page_bytes=pool.page_bytes(spec.name),
        slots_per_page=slots,
        # Before finalize num_pages is the reservation's, of which nothing can be allocated.
        num_pages=max(0, pool.num_pages(spec.name) - pool.min_page_index(spec.name)) if pool.finalized else 0,
        live_pages=None if usage is None else usage.live,
        free_pages=None if usage is None else usage.free,
    )


def _holds_states(spec: SubPoolSpec) -> bool:
    from kvarena.pool import MambaSubPoolSpec

    return isinstance(spec, MambaSubPoolSpec)


def _capacity(
    sub_pools: Sequence[SubPoolStatus], resize: PostCaptureKVResize | None
) -> tuple[int | None, int | None]:
    """Tokens by the attention sub-pools alone, and requests by the states': never one for the other.

    A size that the engine has decided counts before what could be derived here. With states beside the
    tokens only an engine that says for how many requests knows what is left for tokens.
    """
    slots = {each.name: each.num_pages * each.slots_per_page for each in sub_pools}
    attention = {each.name: slots[each.name] for each in sub_pools if each.unit == "tokens"}
    states = [slots[each.name] for each in sub_pools if each.unit == "requests"]
    requests = None if resize is None else resize.capped_max_running_requests
    if resize is not None and (not states or requests is not None):
        tokens: int | None = resize.max_total_num_tokens
    else:
        tokens = attention.get("full", min(attention.values(), default=0)) if attention else None
    if not states:
        return tokens, None
    return tokens, min(states) if requests is None else requests


def _engine(ledger: RegistrationLedger, base: int) -> EngineStatus:
    return EngineStatus(
        name=ledger.engine.name,
        registered_bytes=ledger.registered_bytes,
        regions=tuple((region.address - base, region.nbytes) for region in ledger.regions),
        epoch=ledger.epoch,
        in_flight=ledger.gate.in_flight,
        transfers=ledger.traffic.transfers,
        transferred_bytes=ledger.traffic.nbytes,
        failures=ledger.traffic.failures,
        received_bytes=ledger.traffic.received_nbytes,
        peers=ledger.traffic.peers,
        transfer_seconds=ledger.traffic.seconds,
        transfer_sizes=ledger.traffic.sizes,
    )


def _torch_cached_bytes(device: str) -> int | None:
    torch = sys.modules.get("torch")
    if not device.startswith("cuda") or torch is None or not torch.cuda.is_initialized():
        return None
    # The arena is not the allocator's: neither figure counts it.
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
