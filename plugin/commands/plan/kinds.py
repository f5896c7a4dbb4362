"""Which layers keep what: read from whatever key a model family says it with."""

from __future__ import annotations

from dataclasses import dataclass

from kvarena.plugin.commands.plan.fields import MAX_LAYERS, Fields
from kvarena.plugin.commands.plan.layer_sources import LAYER_SOURCES
from kvarena.plugin.commands.plan.windows import WindowRule, chunk_size, sliding_window

__all__ = ["HEAD_KEYS", "LAYER_COUNT_KEYS", "LayerKind", "count_layers", "layer_kinds"]

LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")

HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")

#: Words whose layer has attention, and the mixer of those that have a state.
_ATTENTION = {"full": "full", "sliding": "sliding", "chunked": "chunked", "hybrid": "full"}
_MIXER = {"mamba": "mamba", "hybrid": "mamba", "conv": "conv", "recurrent": "recurrent", "linear": "linear"}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One layer: the attention that it has, the window that this keeps, and its recurrent mixer."""

    attention: str | None
    window: int | None = None
    mixer: str | None = None


def count_layers(fields: Fields) -> int:
    """Layers that serve a token."""
    # Its published file names no model type; experts that compute nothing are LongCat's alone.
    if fields.model_type.startswith("longcat_flash") or fields.stated("zero_expert_num"):
        return _twice(fields)
    if not any(fields.stated(key) for key in LAYER_COUNT_KEYS):
        # Nemotron-H and its like may leave the count to their list.
        for key in ("layers_block_type", "layer_types", "hybrid_override_pattern", "block_configs"):
            value = fields.raw(key)
            if isinstance(value, (list, str)) and value:
                fields.note(f"{fields.name('num_hidden_layers')} is not in the file: the length of {key}.")
                return fields.whole("num_hidden_layers", len(value), maximum=MAX_LAYERS)
    layers = fields.need(*LAYER_COUNT_KEYS, maximum=MAX_LAYERS)
    loops = fields.count("loop_num", "num_loops", maximum=64)
    if loops is not None and loops > 1:
        fields.note(f"{layers} layers run {loops} times, each time with a cache of its own.")
        return fields.whole("num_hidden_layers", layers * loops, maximum=MAX_LAYERS)
    return layers


def _twice(fields: Fields) -> int:
    """Layers of LongCat Flash: two for each of its blocks, which some files count and some do not."""
    blocks = fields.need("num_layers", maximum=MAX_LAYERS // 2, why="it counts the blocks of two layers")
    layers = fields.count("num_hidden_layers", maximum=MAX_LAYERS)
    if layers not in (None, blocks, 2 * blocks):
        raise fields.error(
            "num_hidden_layers", f"is {layers}, neither {fields.name('num_layers')} {blocks} nor twice that"
        )
    fields.note(f"{blocks} blocks with two attention layers each, as the class builds them.")
    return 2 * blocks


def layer_kinds(fields: Fields, layers: int) -> list[LayerKind]:
    """One kind for each of a model's layers.

    Raises
    ------
    ModelConfigError
        Keys that contradict each other, a word that is not known, or nothing that says it.
    """
    words = _stated(fields, layers) or _assumed(fields, layers)
    window = sliding_window(fields, layers, needed="sliding" in words)
    chunk = chunk_size(fields, needed=True) if "chunked" in words else WindowRule()
    kinds = []
    for index, word in enumerate(words):
        attention = _ATTENTION.get(word)
        rule = {"sliding": window, "chunked": chunk}.get(attention or "")
        kept = rule.at(index) if rule is not None else None
        if rule is not None and kept is None:
            attention = "full"  # switched off: the layer keeps everything
        kinds.append(LayerKind(attention, kept, _MIXER.get(word)))
    return kinds


def _stated(fields: Fields, layers: int) -> list[str] | None:
    """What the file itself says; one key is enough, but the others must not say otherwise."""
    first: tuple[str, list[str]] | None = None
    for key, read in LAYER_SOURCES:
        words = read(fields, layers) if fields.stated(key) else None
        if not words:
            continue
        if first is None:
            first = (key, words)
            continue
        for index, (left, right) in enumerate(zip(first[1], words, strict=True)):
            if left != right and {left, right} not in _SAME:
                raise fields.error(
                    key,
                    f"makes layer {index} {right!r}, but {fields.name(first[0])} makes it {left!r}",
                    fix="Remove the one that is wrong.",
                )
    return first[1] if first else None


#: A rule says "linear" where a list says which kind of it.
_SAME = ({"linear", "mamba"}, {"linear", "conv"})


def _assumed(fields: Fields, layers: int) -> list[str]:
    """What the model's class says where the file is silent, or plain attention."""
    for key, read in LAYER_SOURCES:
        if fields.has_default(key) and (words := read(fields, layers)):
            return words
    if fields.model_type in ("minimax", "minimax_text_01"):
        raise fields.error(
            "layer_types",
            "is missing: some layers are lightning attention, and nothing says which",
            fix="Add layer_types or attn_type_list, or give the geometry by options.",
        )
    recurrent = next((key for key in _RECURRENT_KEYS if fields.stated(key)), None)
    if recurrent is not None or fields.model_type in _ALL_MAMBA:
        return _recurrent(fields, layers, recurrent or "state_size")
    switched_on = fields.stated("use_sliding_window") and fields.flag("use_sliding_window") is True
    window = sliding_window(fields, layers, needed=switched_on)
    if not window.on:
        if fields.stated("attention_chunk_size"):
            raise fields.error(
                "attention_chunk_size",
                "is there, but nothing says which layers are chunked",
                fix="Add layer_types, or give the geometry by options.",
            )
        return ["full"] * layers
    if window.per_layer is not None:
        return ["full" if tokens is None else "sliding" for tokens in window.per_layer]
    first = fields.count("max_window_layers", minimum=0, maximum=MAX_LAYERS)
    if first is not None:
        return ["sliding" if index >= first else "full" for index in range(layers)]
    if fields.model_type not in _ALL_SLIDE:
        raise fields.error(
            "layer_types",
            f"is missing: there is a window of {window.tokens} tokens, and nothing says which layers slide",
            fix="Add layer_types, set sliding_window to null, or give the geometry by options.",
        )
    fields.note(
        f"Every layer slides over {window.tokens} tokens, as the class of {fields.model_type} has it."
    )
    return ["sliding"] * layers


def _recurrent(fields: Fields, layers: int, key: str) -> list[str]:
    if fields.model_type == "falcon_h1":
        return ["hybrid"] * layers
    if fields.model_type == "zamba":
        fields.note("Shared attention every 6th layer from the third on, as the class places it.")
        return [
            "hybrid" if index == 2 or (index > 2 and (index - 3) % 6 == 4) else "mamba"
            for index in range(layers)
        ]
    if fields.model_type in _ALL_MAMBA or not any(name in fields for name in HEAD_KEYS):
        fields.note("No attention: every layer keeps a state.")
        return ["mamba"] * layers
    raise fields.error(
        "layer_types",
        f"is missing: the file has attention heads and {fields.name(key)}, and nothing says which layers "
        "keep what",
        fix="Add layer_types, or give the geometry by options.",
    )


#: Classes whose window is for every layer (transformers 5.19: they keep no schedule).
_ALL_SLIDE = frozenset(
    {
        *("ministral", "mistral", "mixtral", "phi3", "phi3_v", "phi4_multimodal", "phi4mm", "phimoe"),
        *("starcoder2", "voxtral_realtime_text"),
    }
)
_ALL_MAMBA = ("mamba", "mamba2", "falcon_mamba", "granitemoehybrid", "bamba")
_RECURRENT_KEYS = (
    "mamba_d_state",
    "mamba_n_heads",
    "mamba_num_heads",
    "n_mamba_heads",
    "ssm_state_size",
    "state_size",
    "linear_num_value_heads",
    "linear_attn_config",
    "conv_L_cache",
    "lru_width",
)
