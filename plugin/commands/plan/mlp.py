"""Parameters of a layer's feed-forward part: dense, or experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarena.plugin.commands.plan.fields import MAX_LAYERS, Fields
from kvarena.plugin.commands.plan.geometry import LayerCache

__all__ = ["mlp_parameters"]

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
#: Activations whose block has no gate, so two matrices instead of three.
_UNGATED = ("relu2", "gelu_new", "gelu_fast", "relu")


def mlp_parameters(
    fields: Fields, index: int, layers: int, layer: LayerCache, hidden: int
) -> tuple[int, int]:
    """Parameters of layer `index`: outside of routed experts, and in them.

    Raises
    ------
    ModelConfigError
        The file has no size of the feed-forward part.
    """
    alone = _alone(fields, index)
    if alone == "mixer":
        return 0, 0  # there a layer is one thing only
    matrices = 2 if _ungated(fields) else 3
    experts = _experts(fields)
    if experts and (alone == "moe" or (alone is None and _sparse(fields, index, layers))):
        width = fields.count("moe_intermediate_size", "expert_ffn_hidden_size") or _dense_width(
            fields, index, layers, layer
        )
        if fields.model_type.startswith("llama4"):
            width = fields.need("intermediate_size")
        outside = hidden * experts + matrices * hidden * _shared_width(fields, width)  # the router first
        inner = fields.count("moe_latent_size", "routed_expert_hidden_size")
        if inner is None:
            inner = hidden
        else:
            outside += 2 * hidden * inner  # into the latent that the experts work in, and out of it
        return outside, experts * matrices * inner * width
    return matrices * hidden * _dense_width(fields, index, layers, layer), 0


def _alone(fields: Fields, index: int) -> str | None:
    """What a layer is in a family whose layers are one thing only, by letters or by words."""
    pattern: Sequence[Any] | None = fields.text("hybrid_override_pattern")
    if not pattern:
        pattern = fields.items("layers_block_type")
        if not pattern or not {"mlp", "moe"} & {word for word in pattern if isinstance(word, str)}:
            return None
    kind = pattern[index] if index < len(pattern) else None
    return {"E": "moe", "moe": "moe", "-": "mlp", "mlp": "mlp"}.get(str(kind), "mixer")


def _ungated(fields: Fields) -> bool:
    for key in ("mlp_hidden_act", "activation_function", "hidden_act"):
        if fields.stated(key) and fields.raw(key) in _UNGATED:
            return True
    return False


def _experts(fields: Fields) -> int:
    block = fields.block("ffn_config")  # DBRX
    if block is not None and (found := block.count("moe_num_experts")):
        return found
    found = fields.count(*_EXPERTS, minimum=0)
    return found if found is not None and found > 1 else 0


def _sparse(fields: Fields, index: int, layers: int) -> bool:
    """Whether a layer has experts, by whichever rule the family states."""
    if index < (fields.count("first_k_dense_replace", minimum=0, maximum=MAX_LAYERS) or 0):
        return False
    only = fields.indices("mlp_only_layers", layers)
    if only is not None and index in only:
        return False
    period = fields.count("expert_layer_period", maximum=MAX_LAYERS)
    if period is not None:
        offset = fields.count("expert_layer_offset", minimum=0, maximum=MAX_LAYERS) or 0
        return index % period == offset
    for key in ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq"):
        value = fields.raw(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            return (index + 1) % value == 0
        if isinstance(value, list) and index < len(value):
            return bool(value[index])
    return True


def _shared_width(fields: Fields, width: int) -> int:
    """Width of the experts that every token goes through."""
    for key in (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ):
        if fields.stated(key):
            return fields.count(key, minimum=0) or 0
    if fields.model_type.startswith("llama4"):
        return width
    return width * (fields.count("n_shared_experts", "num_shared_experts", minimum=0, maximum=1024) or 0)


def _dense_width(fields: Fields, index: int, layers: int, layer: LayerCache) -> int:
    if layer.row is None and layer.state is None and not fields.stated("intermediate_size"):
        return 0
    if fields.flag("use_double_wide_mlp"):  # Gemma 4: in the layers that use an earlier layer's KV
        shared = fields.count("num_kv_shared_layers", minimum=0, maximum=MAX_LAYERS) or 0
        if index >= layers - shared:
            return 2 * fields.need("intermediate_size")
    block = fields.block("ffn_config")
    if block is not None and (found := block.count("ffn_hidden_size")):
        return found
    value = fields.raw("intermediate_size")
    if isinstance(value, (list, tuple)):  # Gemma 3n gives one for each layer
        return fields.whole("intermediate_size", max(value, default=0)) if value else 0
    keys = ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner")
    for key in keys:
        if fields.stated(key):
            # The first Qwen counts both halves of its gate.
            return fields.need(key) // (2 if fields.model_type == "qwen" else 1)
    return fields.need("intermediate_size", why="the weights' size is made from it")
