"""A plan as plain data, for ``--json`` and for whoever reads it."""

from __future__ import annotations

from typing import Any

from kvarena.plugin.commands.plan.capacity_plan import CapacityPlan, Sizing
from kvarena.plugin.commands.plan.geometry import KVRow, MLARow
from kvarena.plugin.commands.plan.ranks import RankGeometry, SubPool

__all__ = ["gain", "plan_data", "tightest"]


def plan_data(plan: CapacityPlan) -> dict[str, Any]:
    """The whole plan as dictionaries, lists, strings and finite numbers; sizes are bytes."""
    model, request = plan.model, plan.request
    data: dict[str, Any] = {
        "model": {
            "model_type": model.model_type,
            "num_layers": len(model.layers),
            "layers": model.layer_counts(),
            "context_len": model.context_len,
        },
        "tp": request.tp,
        "pp": request.pp,
        "page_size": request.page_size,
        "kv_cache_dtype": request.dtypes.kv,
        "mamba_conv_dtype": request.dtypes.conv,
        "mamba_ssm_dtype": request.dtypes.temporal,
        "attention_dp": request.dp,
        "draft_layers": request.draft_layers,
        "moved": _moved(plan),
        "stages": [_stage(plan, index) for index in range(len(plan.ranks))],
        "request_context_len": plan.context_len,
        "sizings": {sizing.name: _sizing(sizing) for sizing in plan.sizings},
        "gain": gain(plan),
        "fits": plan.fits and plan.problem is None,
        "problem": str(plan.problem) if plan.problem is not None else None,
        "engine": "none" if request.sglang is None else "sglang",
        "sglang": request.sglang,
        "sized_after_capture": _verdict(plan),
        "notes": list(plan.notes),
    }
    if request.card is not None:
        data["gpu_memory_bytes"] = request.card.total_bytes
    return data


def _moved(plan: CapacityPlan) -> dict[str, Any] | None:
    if plan.moved is None:
        return None
    return {
        "tokens": plan.moved.tokens,
        "bytes_per_card": list(plan.moved.per_card),
        "bytes": plan.moved.total,
        "seconds": plan.moved.seconds,
    }


def _verdict(plan: CapacityPlan) -> dict[str, Any] | None:
    if plan.verdict is None:
        return None
    by, flags, reasons = plan.verdict.by, plan.verdict.flags, plan.verdict.reasons
    return {"by": by, "flags": flags, "kvarena_refuses": list(reasons)}


def _stage(plan: CapacityPlan, index: int) -> dict[str, Any]:
    rank, page_size = plan.ranks[index], plan.request.page_size
    context = plan.model.context_len
    return {
        "stage": rank.stage,
        "layers": [rank.layers.start, rank.layers.stop],
        "sub_pools": [_sub_pool(pool, page_size) for pool in rank.sub_pools],
        "sink_bytes": rank.sink_bytes(page_size),
        "floor_bytes": plan.floor_bytes(rank),
        "full_context_bytes": plan.floor_bytes(rank, context_len=context) if context else None,
        "weights_bytes": plan.weights_bytes[index] if plan.weights_bytes is not None else None,
    }


def _sub_pool(pool: SubPool, page_size: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": pool.name,
        "kind": pool.kind,
        "layers": list(pool.layers),
        "num_layers": len(pool.layers),
        "bytes_per_request" if pool.per_request else "bytes_per_token": pool.entry_bytes,
        "bytes_per_page": pool.page_bytes(page_size),
    }
    if pool.window is not None:
        data["window"] = pool.window
    if isinstance(pool.row, KVRow):
        data["kv_heads_per_rank"] = pool.row.kv_heads
        data["head_dim"] = pool.row.head_dim
        data["v_head_dim"] = pool.row.v_head_dim
    elif isinstance(pool.row, MLARow):
        data["kv_lora_rank"] = pool.row.kv_lora_rank
        data["qk_rope_head_dim"] = pool.row.qk_rope_head_dim
    return data


def _sizing(sizing: Sizing) -> dict[str, Any]:
    return {
        "pool_bytes": list(sizing.pool_bytes),
        "tokens": sizing.capacity.tokens,
        "window_tokens": sizing.capacity.window_tokens,
        "states": sizing.capacity.states,
        "requests": sizing.requests,
        "most_slots": [dict(slots) for slots in sizing.max_slots],
        "mem_fraction_static": sizing.mem_fraction_static,
        "kept_back_bytes": dict(sizing.kept_back),
        "fits": sizing.fits,
    }


def gain(plan: CapacityPlan) -> dict[str, Any] | None:
    """What kvarena brings by sizing after capture; the percentage is ``None`` where there was nothing before.

    ``None`` where kvarena refuses the model or the settings. For the architecture alone, what an engine
    that sizes after capture would gain.
    """
    before, after = plan.sizing("before_capture"), plan.sizing("after_capture")
    if before is None or after is None or (plan.verdict is not None and plan.verdict.by != "kvarena"):
        return None
    old, new = before.capacity.tokens, after.capacity.tokens
    tokens = None if old is None or new is None else new - old
    return {
        "bytes": min(a - b for a, b in zip(after.pool_bytes, before.pool_bytes, strict=True)),
        "tokens": tokens,
        "percent": round(100 * tokens / old, 2) if tokens is not None and old else None,
        "requests": after.requests - before.requests,
    }


def tightest(plan: CapacityPlan) -> RankGeometry:
    """The stage that the tables show first: the one with most bytes per token."""
    return max(plan.ranks, key=lambda rank: (sum(pool.entry_bytes for pool in rank.token_pools), -rank.stage))
