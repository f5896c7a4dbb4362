"""Why a configuration cannot be sized after capture: every reason at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

__all__ = ["Refusal", "SizingPlan", "SizingRequest", "post_capture_kv_sizing_planned"]

# Kinds of KV whose pages a pool can back, resize and register.
SUPPORTED_KINDS = frozenset({"mha"})


@final
@dataclass(frozen=True)
class SizingRequest:
    """A server's configuration, as far as it decides whether its pool can be sized after capture.

    An engine's adapter fills it. The defaults are a configuration that is
    accepted but for `enabled`, `driver` and the captured sizes.
    """

    enabled: bool = False
    """Whether the operator asked for it."""
    device: str = "cuda"
    """The device's type, for texts."""
    driver: str | None = "cuda"
    """The virtual memory that backs the device: ``"cuda"``, ``"host"``; None: there is none."""
    role: str = "null"
    """``"prefill"``, ``"decode"``, or ``"null"`` for a server that does both (SGLang's word)."""
    unified: bool = True
    """Whether the KV lies in one unified pool."""
    hybrid: bool = True
    """Whether the model has full and sliding-window attention."""
    sub_pool_kinds: tuple[str, ...] = ("mha", "mha")
    """The kind of each sub-pool: ``"mha"``, ``"mla"``, ``"mamba"``, or the engine's own word."""
    decode_graphs: bool = True
    """Whether decode steps run as captured graphs (on the host: as warmed-up steps)."""
    prefill_graphs: bool = True
    """Whether prefill chunks do."""
    chunked_prefill_size: int | None = None
    """Tokens of the largest prefill step; None or not positive: no bound."""
    prefill_captured_sizes: tuple[int, ...] = ()
    """Tokens of each prefill step that is captured."""
    transfer_backend: str | None = None
    """The transfer engine of prefill/decode disaggregation."""
    transfer_protocol: str | None = None
    """What it runs on: ``"tcp"``, ``"rdma"``, ``"efa"``."""
    memory_saver: bool = False
    """Whether something else unmaps and remaps the pool (sleep and wake-up)."""
    custom_mem_pool: str | None = None
    """A custom allocator that the KV is to come from."""
    dcp_size: int = 1
    """Ranks that share the tokens of a sequence in decode."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of a sequence in prefill."""
    speculative_algorithm: str | None = None
    """Speculative decoding, whose drafts have pools of their own."""
    draft_runners: int = 0
    """Draft models that allocate KV beside the target."""
    is_draft_worker: bool = False
    """Whether the configuration at hand is a draft's."""
    ray: bool = False
    """Whether Ray starts the workers."""
    kv_cache_sharding: bool = False
    """Whether pages are sharded logically."""
    hisparse: bool = False
    """Whether a sparse cache maps device pages to host pages."""
    kv_cache_disabled: bool = False
    """Whether prefill keeps no KV at all."""
    setting_names: Mapping[str, str] = field(default_factory=dict)
    """What the engine calls a field above: ``{"memory_saver": "--enable-memory-saver"}``."""


@final
@dataclass(frozen=True)
class Refusal:
    """One reason against sizing after capture."""

    code: str
    """Stable, for metrics: ``kvarena_refusals_total{reason=...}``."""
    setting: str
    """The setting that caused it, by the engine's name; empty: none of them."""
    reason: str
    """In words, with what to do about it."""


@final
@dataclass(frozen=True)
class SizingPlan:
    """Whether a pool is sized after capture, and every reason why not."""

    refusals: tuple[Refusal, ...] = ()

    @property
    def planned(self) -> bool:
        """No reason speaks against it; otherwise the engine uses its own eager pool."""
        return not self.refusals

    def __bool__(self) -> bool:
        return self.planned


def post_capture_kv_sizing_planned(request: SizingRequest) -> SizingPlan:
    """Every built-in reason against sizing after capture.

    The reasons are those of SGLang's planner of the same name (0.5.23), with
    what it leaves to other code: Ray, whose workers load no plugins, draft
    workers, and the driver. Others add theirs through ``kvarena_refusals``.

    Parameters
    ----------
    request : SizingRequest
        The configuration.

    Returns
    -------
    SizingPlan
        True in a condition when it is planned.
    """
    found = []
    for check in _CHECKS:
        reason = check.reason(request)
        if reason:
            setting = request.setting_names.get(check.field, check.field)
            found.append(Refusal(check.code, setting, reason))
    return SizingPlan(tuple(found))


@dataclass(frozen=True)
class _Check:
    code: str
    field: str
    reason: Callable[[SizingRequest], str | None]


def _when(code: str, field: str, holds: Callable[[SizingRequest], bool], reason: str) -> _Check:
    return _Check(code, field, lambda request: reason.format(r=request) if holds(request) else None)


def _unsupported_kinds(request: SizingRequest) -> str | None:
    odd = sorted(set(request.sub_pool_kinds) - SUPPORTED_KINDS)
    if not odd:
        return None
    return f"KV of the kind {', '.join(odd)} cannot be sized after capture; {', '.join(SUPPORTED_KINDS)} can"


def _uncovered_prefill(request: SizingRequest) -> str | None:
    if request.role == "decode" or not request.prefill_graphs:
        return None
    chunk = request.chunked_prefill_size
    if chunk is None or chunk <= 0:
        return "prefill steps have no bound, so none is sure to be captured; set a chunk size"
    largest = max(request.prefill_captured_sizes, default=0)
    if largest >= chunk:
        return None
    return (
        f"a prefill step may have {chunk} tokens but the largest that is captured has {largest}, so "
        "activations of larger ones are not in what is measured; capture that size, or lower the chunk"
    )


_CHECKS = (
    _when("disabled", "enabled", lambda r: not r.enabled, "it was not asked for"),
    _when(
        "no_driver",
        "driver",
        lambda r: r.driver not in ("cuda", "host"),
        "there is no virtual memory driver for {r.device}; it needs CUDA, or the host's",
    ),
    _when(
        "memory_saver",
        "memory_saver",
        lambda r: r.memory_saver,
        "the memory saver unmaps the pool itself; turn one of the two off",
    ),
    _when(
        "custom_mem_pool",
        "custom_mem_pool",
        lambda r: r.custom_mem_pool is not None,
        "the KV is to come from the custom pool {r.custom_mem_pool}, which cannot be backed late; unset it",
    ),
    _when(
        "efa",
        "transfer_protocol",
        lambda r: (r.transfer_protocol or "").lower() == "efa",
        "EFA cannot register CUDA virtual memory (libfabric needs SYNC_MEMOPS); use another transport",
    ),
    _when(
        "decode_context_parallel",
        "dcp_size",
        lambda r: r.dcp_size != 1,
        "{r.dcp_size} ranks share a sequence's tokens in decode; use 1",
    ),
    _when(
        "context_parallel",
        "context_parallel_size",
        lambda r: r.context_parallel_size != 1,
        "{r.context_parallel_size} ranks share a sequence's tokens in prefill; use 1",
    ),
    _when("ray", "ray", lambda r: r.ray, "workers that Ray starts load no plugins; start them without Ray"),
    _when(
        "draft_worker",
        "is_draft_worker",
        lambda r: r.is_draft_worker,
        "a draft's pool follows its target's size and is not sized by itself",
    ),
    _when(
        "speculative",
        "speculative_algorithm",
        lambda r: r.speculative_algorithm is not None or r.draft_runners > 0,
        "speculative decoding ({r.speculative_algorithm}, {r.draft_runners} draft runners) has pools "
        "beside this one, which would be charged twice; turn it off",
    ),
    _when(
        "no_decode_graphs",
        "decode_graphs",
        lambda r: r.role != "prefill" and not r.decode_graphs,
        "decode steps are not captured, so their activations are not in what is measured; capture them",
    ),
    _when(
        "no_prefill_graphs",
        "prefill_graphs",
        lambda r: r.role != "decode" and not r.prefill_graphs,
        "prefill steps are not captured, so their activations are not in what is measured; capture them",
    ),
    _Check("prefill_not_covered", "chunked_prefill_size", _uncovered_prefill),
    _when("not_unified", "unified", lambda r: not r.unified, "the KV does not lie in one unified pool"),
    _when(
        "not_hybrid",
        "hybrid",
        lambda r: not r.hybrid,
        "the model has not both full and sliding-window attention, for which this pool is made",
    ),
    _Check("unsupported_kind", "sub_pool_kinds", _unsupported_kinds),
    _when(
        "hisparse",
        "hisparse",
        lambda r: r.hisparse,
        "HiSparse keeps its own mapping of pages to the host; turn it off",
    ),
    _when(
        "kv_cache_sharding",
        "kv_cache_sharding",
        lambda r: r.kv_cache_sharding,
        "sharded pages run prefill without captured graphs; turn sharding off",
    ),
    _when(
        "no_kv_cache",
        "kv_cache_disabled",
        lambda r: r.kv_cache_disabled,
        "prefill keeps no KV, so there is no pool to size",
    ),
)
