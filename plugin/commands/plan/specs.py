"""From a plan to the pool's own layouts. Imports torch: for whoever is about to build a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarena.plugin.commands.plan.errors import PlanError
from kvarena.plugin.commands.plan.geometry import KVRow, ModelGeometry, StateShape
from kvarena.plugin.commands.plan.ranks import FP4, CacheDtypes, RankGeometry, SubPool

if TYPE_CHECKING:
    import torch
    from kvarena.pool.layout import GrowDirection, SubPoolSpec

__all__ = ["pool_specs"]


def pool_specs(
    model: ModelGeometry, rank: RankGeometry, dtypes: CacheDtypes | None = None
) -> tuple[SubPoolSpec, ...]:
    """A rank's sub-pools as `kvarena.pool` layouts, low end of the arena first.

    Raises
    ------
    PlanError
        Layers of one kind with rows of several sizes, or an indexer: no layout describes them.
    """
    dtypes = dtypes or CacheDtypes()
    last = len(rank.sub_pools) - 1
    return tuple(
        _spec(model, rank, pool, dtypes, "up" if at == 0 else "down" if at == last else "float")
        for at, pool in enumerate(rank.sub_pools)
    )


def _spec(
    model: ModelGeometry, rank: RankGeometry, pool: SubPool, dtypes: CacheDtypes, direction: GrowDirection
) -> SubPoolSpec:
    from kvarena.pool.layout import MHASubPoolSpec, MLASubPoolSpec

    if pool.per_request:
        return _state_spec(model, rank, pool, dtypes, direction)
    if pool.row is None:
        raise PlanError(
            f"Sub-pool {pool.name} has no layout: its layers keep rows of several sizes.",
            fix="Keep them in pools of their own.",
        )
    if dtypes.kv == FP4:
        raise PlanError("FP4 KV has scales beside it: no layout describes them.", fix="Use another dtype.")
    dtype = _torch_dtype(dtypes.kv)
    if isinstance(pool.row, KVRow):
        row = pool.row
        return MHASubPoolSpec(
            pool.name, direction, len(pool.layers), row.kv_heads, row.head_dim, dtype, row.v_head_dim
        )
    rank_dim, rope = pool.row.kv_lora_rank, pool.row.qk_rope_head_dim
    return MLASubPoolSpec(pool.name, direction, len(pool.layers), rank_dim, rope, dtype)


def _state_spec(
    model: ModelGeometry, rank: RankGeometry, pool: SubPool, dtypes: CacheDtypes, direction: GrowDirection
) -> SubPoolSpec:
    from kvarena.pool.layout import MambaSubPoolSpec

    shapes = {model.layers[index].state for index in pool.layers}
    shape = next(iter(shapes))
    if len(shapes) != 1 or not isinstance(shape, StateShape):
        raise PlanError("The states have several shapes: no layout describes them.")
    conv, temporal = shape.conv_elements(rank.tp), shape.temporal_elements(rank.tp)
    conv_shape = (conv // max(shape.taps, 1), shape.taps)
    conv_dtype, temporal_dtype = _torch_dtype(dtypes.conv), _torch_dtype(dtypes.temporal)
    if not temporal:
        # A short convolution is nothing but its window.
        return MambaSubPoolSpec(
            pool.name, direction, len(pool.layers), (), conv_shape, conv_dtype, conv_dtype
        )
    heads = shape.heads // rank.tp
    return MambaSubPoolSpec(
        pool.name,
        direction,
        len(pool.layers),
        (conv_shape,) if conv else (),
        (heads, shape.head_elements),
        conv_dtype,
        temporal_dtype,
    )


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    names = {
        "bf16": torch.bfloat16,
        "half": torch.float16,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
    dtype = names.get(name) or getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
