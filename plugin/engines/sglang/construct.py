"""A unified pool of SGLang's, built on ``meta`` and then laid over an arena."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kvarena.errors import KvArenaError
from kvarena.plugin.closing import failures_of
from kvarena.plugin.engines.sglang.bound import SglangPool, bound_of
from kvarena.plugin.engines.sglang.families.targets import Support
from kvarena.plugin.engines.sglang.ranks import ranks_of_sglang, roll_call
from kvarena.plugin.engines.sglang.report import announce_reserved
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.pool import Arena
from kvarena.pool.transaction import add_note

__all__ = [
    "construct",
    "factory",
    "in_configurator",
    "post_capture_active",
    "post_capture_backed_bytes",
    "sink_bytes_of",
]

#: Back-port: the configurator that is building a pool to be sized after capture.
_configurator: contextvars.ContextVar[Any] = contextvars.ContextVar("kvarena_configurator", default=None)
#: Back-port: context length and window of the pool that is being built, for the floor of one request.
_lengths: contextvars.ContextVar[tuple[int | None, int | None]] = contextvars.ContextVar(
    "kvarena_lengths", default=(None, None)
)


def in_configurator(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """Around ``KVCacheConfigurator._init_unified_swa_pools``: remember whether it is to be sized later."""
    wanted = runtime.acts() and bool(runtime.planned) and bool(self.post_capture_kv_active)
    token = _configurator.set(self if wanted else None)
    try:
        return original(self, **kwargs)
    finally:
        _configurator.reset(token)


def factory(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Around ``init_unified_swa_pools``: remember the lengths that set the floor (0.5.17 passes none)."""
    configurator = _configurator.get()
    if configurator is None:
        return original(**kwargs)
    model = configurator.model_config
    context = kwargs.get("model_context_len") or model.context_len
    window = kwargs.get("sliding_window_size") or model.sliding_window_size
    token = _lengths.set((context, window))
    try:
        return original(**kwargs)
    finally:
        _lengths.reset(token)


def construct(original: Callable[..., None], self: Any, **kwargs: Any) -> None:
    """Around ``UnifiedKVPool.__init__``: reserve instead of allocate, and back the sink only.

    Stock's constructor runs on ``meta``, where it touches no byte; the views are then made again, by the
    pool's own builders, over the arena.
    """
    native = runtime.support is Support.NATIVE
    if native:
        wanted = runtime.acts() and bool(runtime.planned) and bool(kwargs.get("post_capture_active"))
    else:
        wanted = _configurator.get() is not None
    if not wanted:
        original(self, **kwargs)
        return
    roll_call(ranks_of_sglang())
    device = kwargs["device"]
    stock = kwargs | {"device": "meta"}
    if native:
        stock["post_capture_active"] = False
    original(self, **stock)
    floor_terms = getattr(self, "_bs1_floor_terms", None) or _floor_terms(self)
    bound, reserve_ms, sink_ms = _lay_over_arena(self, device, floor_terms)
    runtime.pools.append(bound)
    bound.on_close.append(lambda: runtime.pools.remove(bound))
    try:
        announce_reserved(bound, reserve_ms=reserve_ms, sink_ms=sink_ms)
    except BaseException as error:
        for second in failures_of(bound.close, "the pool"):
            add_note(error, f"this failed too: {second}")
        raise


def _lay_over_arena(
    pool: Any, device: Any, floor_terms: Sequence[tuple[str, int]]
) -> tuple[SglangPool, float, float]:
    """The pool over an arena, and the milliseconds that the addresses and the sink took."""
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    driver = runtime.manager.hook.kvarena_driver(device=where)
    if driver is None:
        raise KvArenaError(
            f"no driver answers for {where}.", fix="Unset KVARENA_ENABLE, or use a CUDA device."
        )
    raw_bytes = pool._raw.numel()  # the reservation and, up to 0.5.21, the tail that views may reach into
    sink = sink_bytes_of(pool)
    began = time.perf_counter()
    arena = Arena(driver, raw_bytes)
    reserved = time.perf_counter()
    try:
        arena.back(sink)
        backed = time.perf_counter()
        _rebind(pool, arena.tensor[:raw_bytes], device)
        bound = SglangPool(pool, arena, runtime.manager, sink_bytes=sink, floor_terms=floor_terms)
        if runtime.support is Support.NATIVE:
            pool.post_capture_active = True
            pool._post_capture_owner = bound
            pool._accessible_bytes = sink
        return bound, (reserved - began) * 1e3, (backed - reserved) * 1e3
    except BaseException:
        arena.close()
        raise


def _rebind(pool: Any, raw: torch.Tensor, device: Any) -> None:
    pool._raw, pool.device = raw, device
    for kind, paged in (("mha", True), ("mla", True), ("mamba", False)):
        views = getattr(pool, f"_{kind}_views", {})
        build = getattr(pool, f"_build_{kind}_views", None)
        for name in list(views):
            assert build is not None  # one of the shapes that were checked
            page_size = {"page_size": pool._page_size} if paged else {}
            views[name] = build(pool.spec(name), pool._anchor_bytes[name], pool._max_slots[name], **page_size)
            strangers = [t for t in _tensors(views[name]) if t.untyped_storage().data_ptr() != raw.data_ptr()]
            if strangers:
                raise KvArenaError(f"{len(strangers)} views of sub-pool {name!r} do not lie over the arena.")


def _tensors(views: Any) -> list[torch.Tensor]:
    if isinstance(views, torch.Tensor):
        return [views]
    return [tensor for view in views for tensor in _tensors(view)]


def sink_bytes_of(pool: Any) -> int:
    """Bytes of page 0 of the sub-pool with the largest pages: where captured graphs write.

    A Mamba sub-pool has one slot a page, whatever the page size.
    """
    return max(
        int(spec.entry_bytes()) * (1 if hasattr(spec, "conv_state_shapes") else int(pool._page_size))
        for spec in pool.sub_pool_specs
    )


def _floor_terms(pool: Any) -> list[tuple[str, int]]:
    """One sliding window (and a page of slack) and the sink, as 0.5.22's own floor charges them."""
    context, window = _lengths.get()
    spec = pool._specs_by_name.get("swa")
    if spec is None or context is None:
        return []
    tokens = context if window is None else min(context, window + pool._page_size)
    return [("swa_window_kv", tokens * int(spec.entry_bytes())), ("sink", sink_bytes_of(pool))]


def _is_active(self: Any) -> bool:
    return True if bound_of(self) is not None else bool(_stock_property(self, "post_capture_active"))


def _backed_bytes(self: Any) -> int:
    bound = bound_of(self)
    return int(_stock_property(self, "post_capture_backed_bytes")) if bound is None else bound.backed_bytes


def _stock_property(self: Any, name: str) -> Any:
    """What the class had before: the property of the nearest class that is not ours."""
    for owner in type(self).__mro__:
        value = vars(owner).get(name)
        if isinstance(value, property) and value not in (post_capture_active, post_capture_backed_bytes):
            assert value.fget is not None
            return value.fget(self)
    return False


post_capture_active = property(_is_active)
post_capture_backed_bytes = property(_backed_bytes)
