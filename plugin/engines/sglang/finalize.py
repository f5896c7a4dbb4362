"""Finalize inside SGLang: one transaction over all ranks, which backs off instead of dying.

SGLang calls, in this order and from ``ModelRunner.post_capture_resize_kv_pool``: ``config_from_budget``,
``finalize_backing`` and the allocator's ``resize``. Each is a hook here; a `ResizeSession` joins them.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from typing import Any

import torch
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.sglang.bound import SglangPool, bound_of
from kvarena.plugin.engines.sglang.capacity import check_resizable, take_capacity
from kvarena.plugin.engines.sglang.measure.resizing import size_before_resize
from kvarena.plugin.engines.sglang.ranks import ranks_of_sglang
from kvarena.plugin.engines.sglang.report import watch
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.engines.sglang.session import ResizeSession
from kvarena.pool.errors import PoolStateError

__all__ = ["config_from_budget", "finalize_backing", "resize_allocator", "resize_kv_pool"]

#: The resize that is under way, so that the hooks below it find each other.
_current_session: contextvars.ContextVar[ResizeSession | None] = contextvars.ContextVar(
    "kvarena_resize_session", default=None
)


def resize_kv_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.post_capture_resize_kv_pool``: all of it on every rank, or none of it on any."""
    bound = bound_of(self.token_to_kv_pool)
    if bound is None:
        return original(self, **kwargs)
    session = _session(bound, ranks=ranks_of_sglang(), runner=self)
    token = _current_session.set(session)
    try:
        with session:
            session.sizing = size_before_resize(bound, self, session.steps.ranks)
            result = original(self, **kwargs)
            session.finish()
        return result
    finally:
        _current_session.reset(token)


def config_from_budget(
    original: Callable[..., Any], self: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Around ``KVCacheConfigurator.config_from_budget``: during a resize, the same tokens on every rank."""
    session = _current_session.get()
    if session is None:
        return original(self, budget_bytes, cap_tokens=cap_tokens)
    page = session.bound.page_size
    return session.solve(
        lambda budget: (
            original(self, budget, cap_tokens=cap_tokens)
            if session.steps.ranks.count == 1
            else _config_of_this_rank(self, budget, cap_tokens, page)
        ),
        lambda tokens: _solver(self).calculate_pool_sizes_from_max_tokens(tokens, page),
        # SGLang's own budget leaves a fixed reserve; ours leaves what was measured.
        budget_bytes if session.sizing is None else session.sizing.pool_bytes,
    )


def finalize_backing(original: Callable[..., Any], self: Any, config: Any) -> Any:
    """Around ``finalize_backing`` of the pool (0.5.22 and later) or of the pair above it (before)."""
    bound = bound_of(self)
    if bound is None:
        return original(self, config)
    session = _current_session.get()
    if session is not None:
        session.back(config)
        _poison(bound)
        return None
    # Called by somebody else than ModelRunner: one rank, and its caller decides what follows a failure.
    with _session(bound) as alone:
        alone.back(config)
        _poison(bound)
        alone.publish()
    return None


def _poison(bound: SglangPool) -> None:
    """SGLang's debug switch (0.5.18 and later): reads of bytes that nobody wrote fail. The sink is read."""
    from sglang.srt.environ import envs

    switch = getattr(envs, "SGLANG_DEBUG_POISON_POOL", None)
    if switch is not None and switch.get():
        even = (bound.total_bytes - bound.sink_bytes) & ~1
        bound.raw[bound.sink_bytes :][:even].view(torch.bfloat16).fill_(math.nan)


def resize_allocator(original: Callable[..., Any], self: Any, config: Any) -> Any:
    """Around the hybrid-SWA allocator's ``resize``."""
    bound = bound_of(self)
    if bound is None:
        return original(self, config)
    check_resizable(self, bound, config)
    saved = take_capacity(self, bound, config, _family())
    session = _current_session.get()
    if session is not None:
        session.steps.undo(saved.restore, "giving SGLang's allocators their old size")
    watch(bound, self)
    return None


def _config_of_this_rank(configurator: Any, budget: int, cap_tokens: int | None, page_size: int) -> Any:
    """What stock computes, without its own collective.

    With pipeline stages stock reduces the tokens right here, and a rank that failed before would leave
    the others waiting. The session agrees on tokens itself; `cap_tokens` is within the user's limit.
    """
    solver = _solver(configurator)
    config = solver.calculate_pool_sizes(budget, page_size)
    if cap_tokens is not None and cap_tokens < config.max_total_num_tokens:
        config = solver.calculate_pool_sizes_from_max_tokens(cap_tokens, page_size)
    return config


def _solver(configurator: Any) -> Any:
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    return create_memory_pool_configurator(configurator)


def _session(bound: SglangPool, **options: Any) -> ResizeSession:
    settings = runtime.settings or Settings(enable=True)
    return ResizeSession(bound, _family(), manager=runtime.manager, settings=settings, **options)


def _family() -> Any:
    if runtime.family is None:
        raise PoolStateError("kvarena is not attached to this process.")
    return runtime.family
