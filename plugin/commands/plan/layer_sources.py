"""Every key by which a model family says what its layers are, and how it is read.

A reader answers with one word for each layer: ``full``, ``sliding``, ``chunked``, ``linear``,
``mamba``, ``conv``, ``recurrent``, ``hybrid`` (attention and a Mamba state) or ``none``.
"""

from __future__ import annotations

from collections.abc import Callable

from kvarena.plugin.commands.plan.fields import MAX_LAYERS, Fields
from kvarena.plugin.commands.plan.windows import chunk_size, sliding_window

__all__ = ["LAYER_SOURCES", "Reader"]

Reader = Callable[[Fields, int], "list[str] | None"]

# What each family calls a layer, in kvarena's words.
_FULL = (
    "full",
    "attention",
    "full_attention",
    "global",
    "global_attention",
    "attn",
    "deepseek_sparse_attention",
    "minicpm4",
    "minicpm",
    "standard",
)
_SLIDING = ("sliding", "sliding_attention", "sliding_window_attention", "swa", "local", "local_attention")
_WORDS = {
    **dict.fromkeys(_FULL, "full"),
    **dict.fromkeys(_SLIDING, "sliding"),
    **dict.fromkeys(("chunked", "chunked_attention"), "chunked"),
    **dict.fromkeys(("linear", "linear_attention", "kda", "gated_deltanet"), "linear"),
    **dict.fromkeys(("lightning", "lightning_attn", "lightning-attn"), "linear"),
    **dict.fromkeys(("mamba", "mamba2"), "mamba"),
    **dict.fromkeys(("conv", "short_conv"), "conv"),
    **dict.fromkeys(("recurrent",), "recurrent"),
    **dict.fromkeys(("hybrid",), "hybrid"),
    **dict.fromkeys(("mlp", "moe"), "none"),
}
_NEMOTRON_LETTERS = {"M": "mamba", "*": "full", "-": "none", "E": "none"}


def _list_of(key: str) -> Reader:
    def read(fields: Fields, layers: int) -> list[str] | None:
        values = fields.items(key)
        if not values:
            return None
        words = []
        for value in values:
            word = _WORDS.get(value) if isinstance(value, str) else None
            if word is None:
                raise fields.error(
                    key,
                    f"names a kind of layer that is not known here: {str(value)[:40]!r}",
                    fix="Known are those of transformers, like full_attention, sliding_attention or mamba; "
                    "or give the geometry by options.",
                )
            words.append(word)
        return _cut(fields, key, words, layers)

    return read


def _cut(fields: Fields, key: str, words: list[str], layers: int) -> list[str]:
    """A list that may go on with layers for multi-token prediction."""
    extra = len(words) - layers
    if extra > 0 and fields.count("num_nextn_predict_layers", minimum=0, maximum=MAX_LAYERS) == extra:
        fields.note(f"The last {extra} of {key} are for multi-token prediction: not counted.")
        return words[:layers]
    if extra:
        raise fields.error(
            key, f"has {len(words)} entries for {layers} layers", fix="Correct it or num_hidden_layers."
        )
    return words


def _flags(key: str, words: dict[int, str]) -> Reader:
    """A list of 0 and 1 (or false and true), one for each layer."""

    def read(fields: Fields, layers: int) -> list[str] | None:
        values = fields.items(key)
        if not values:
            return None
        found = []
        for value in values:
            if not isinstance(value, int) or int(value) not in words:
                raise fields.error(key, f"holds {str(value)[:40]!r}; it must hold 0 and 1")
            found.append(words[int(value)])
        return _cut(fields, key, found, layers)

    return read


def _indices(key: str, inside: str, outside: str) -> Reader:
    """A list of the layers that are `inside`."""

    def read(fields: Fields, layers: int) -> list[str] | None:
        chosen = fields.indices(key, layers)
        if chosen is None:
            return None
        return [inside if index in chosen else outside for index in range(layers)]

    return read


def _every(key: str, inside: str, outside: str) -> Reader:
    """Each n-th layer is `inside`, the first such being n - 1."""

    def read(fields: Fields, layers: int) -> list[str] | None:
        every = fields.count(key, maximum=MAX_LAYERS)
        if every is None:
            return None
        return [inside if (index + 1) % every == 0 else outside for index in range(layers)]

    return read


def _nemotron(fields: Fields, layers: int) -> list[str] | None:
    pattern = fields.text("hybrid_override_pattern")
    if not pattern:
        return None
    unknown = set(pattern) - set(_NEMOTRON_LETTERS)
    if unknown:
        raise fields.error(
            "hybrid_override_pattern",
            f"holds {min(unknown)!r}; known are {' '.join(_NEMOTRON_LETTERS)}",
            fix="Give the geometry by options.",
        )
    return _cut(fields, "hybrid_override_pattern", [_NEMOTRON_LETTERS[c] for c in pattern], layers)


def _kimi(fields: Fields, layers: int) -> list[str] | None:
    block = fields.block("linear_attn_config")
    if block is None:
        return None
    # Counted from 1 in Kimi's files; a list with a 0 in it is not.
    named = [*(block.items("full_attn_layers") or ()), *(block.items("kda_layers") or ())]
    first = 0 if any(value == 0 and value is not False for value in named) else 1
    full = block.indices("full_attn_layers", layers, first=first)
    kda = block.indices("kda_layers", layers, first=first)
    if full is None and kda is None:
        return None
    if full is not None and kda is not None and (full & kda or len(full | kda) != layers):
        raise block.error("kda_layers", f"and full_attn_layers do not share out the {layers} layers")
    linear = kda if kda is not None else frozenset(range(layers)) - (full or frozenset())
    return ["linear" if index in linear else "full" for index in range(layers)]


def _group_size(fields: Fields, layers: int) -> list[str] | None:
    if isinstance(fields.raw("layer_group_size"), list):
        return _flags("layer_group_size", {0: "full", 1: "linear"})(fields, layers)
    return _every("layer_group_size", "full", "linear")(fields, layers)


def _period(fields: Fields, layers: int) -> list[str] | None:
    if fields.model_type.startswith("zamba"):
        return None  # there it does not say where the shared attention is
    period = fields.count("attn_layer_period", maximum=MAX_LAYERS)
    if period is None:
        return None
    offset = fields.count("attn_layer_offset", minimum=0, maximum=MAX_LAYERS) or 0
    if offset >= period:
        raise fields.error("attn_layer_offset", f"is {offset}, not below attn_layer_period {period}")
    return ["full" if index % period == offset else "mamba" for index in range(layers)]


def _repeated(key: str, *, local: bool) -> Reader:
    """A pattern that repeats: Recurrent Gemma's, whose attention is always local, and MiniCPM's."""

    def read(fields: Fields, layers: int) -> list[str] | None:
        pattern = fields.items(key)
        if not pattern:
            return None
        words = _list_of(key)(fields, len(pattern)) or []
        if local:
            words = ["sliding" if word == "full" else word for word in words]
        return [words[index % len(words)] for index in range(layers)]

    return read


def _full_attention_layers(fields: Fields, layers: int) -> list[str] | None:
    """Indices of full layers; which kind the others are, other keys say."""
    chosen = fields.indices("full_attention_layers", layers)
    if chosen is None:
        return None
    if fields.stated("linear_num_value_heads"):
        other = "linear"
    elif sliding_window(fields, layers, needed=False).on:
        other = "sliding"
    elif len(chosen) < layers:
        raise fields.error(
            "full_attention_layers",
            f"names {len(chosen)} of {layers} layers, and nothing says what the others are",
            fix="Add layer_types, or give the geometry by options.",
        )
    else:
        other = "full"
    return ["full" if index in chosen else other for index in range(layers)]


def _gpt_neo(fields: Fields, layers: int) -> list[str] | None:
    found: list[str] = []
    for item in fields.items("attention_types") or []:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], list):
            raise fields.error("attention_types", "must be a list of [kinds, repeats]")
        times = fields.whole("attention_types", item[1], maximum=MAX_LAYERS)
        kinds = [_WORDS.get(kind) if isinstance(kind, str) else None for kind in item[0]]
        if None in kinds:
            raise fields.error("attention_types", "names a kind that is not known here")
        found += [kind for kind in kinds if kind is not None] * times
        if len(found) > MAX_LAYERS:
            raise fields.error("attention_types", f"makes more than {MAX_LAYERS} layers")
    return _cut(fields, "attention_types", found, layers) if found else None


def _blocks(fields: Fields, layers: int) -> list[str] | None:
    """Nemotron-NAS: a record for each layer, some without attention."""
    values = fields.items("block_configs")
    if not values:
        return None
    words = []
    for index, value in enumerate(values):
        attention = value.get("attention") if isinstance(value, dict) else None
        if not isinstance(attention, dict):
            raise fields.error("block_configs", f"has no attention record for layer {index}")
        gone = attention.get("no_op") or attention.get("replace_with_linear")
        words.append("none" if gone else "sliding" if attention.get("window_length") else "full")
    return _cut(fields, "block_configs", words, layers)


def _pattern(key: str) -> Reader:
    """A window pattern: every n-th layer is full, or letters L and G that repeat."""

    def read(fields: Fields, layers: int) -> list[str] | None:
        if not sliding_window(fields, layers, needed=False).on:
            return None  # nothing slides, whatever the pattern says
        value = fields.raw(key)
        if isinstance(value, str):
            if not value or set(value) - set("LG"):
                raise fields.error(key, f"is {value[:40]!r}; letters are L (local) and G (global)")
            words = ["sliding" if value[i % len(value)] == "L" else "full" for i in range(layers)]
            if fields.model_type.startswith("exaone"):
                words[-1] = "full"  # the class keeps the last layer global
            return words
        if isinstance(value, list):
            return _flags(key, {0: "full", 1: "sliding"})(fields, layers)
        every = fields.need(key, maximum=MAX_LAYERS)
        if fields.model_type.startswith("muse_glimmer"):  # counted backward from the last
            return ["full" if (layers - 1 - i) % every == 0 else "sliding" for i in range(layers)]
        if fields.model_type.startswith(("modernbert", "cwm", "granite")):
            return ["full" if i % every == 0 else "sliding" for i in range(layers)]
        dense_every = fields.count("prefix_dense_sliding_window_pattern", maximum=MAX_LAYERS)
        dense = fields.count("first_k_dense_replace", minimum=0, maximum=layers) if dense_every else 0
        words = ["full" if (i + 1) % (dense_every or 1) == 0 else "sliding" for i in range(dense or 0)]
        words += ["full" if (i + 1) % every == 0 else "sliding" for i in range(layers - len(words))]
        if fields.model_type.startswith("gemma4"):
            words[-1] = "full"  # the class keeps the last layer global
        return words

    return read


def _chunked(fields: Fields, layers: int) -> list[str] | None:
    """Llama 4: layers with rotary positions are chunked; an empty list means the class's pattern."""
    if not (fields.model_type.startswith("llama4") or "no_rope_layers" in fields):
        return None
    if not chunk_size(fields, needed=False).on:
        return None
    if words := _flags("no_rope_layers", {0: "full", 1: "chunked"})(fields, layers):
        return words
    interval = fields.count("no_rope_layer_interval", maximum=MAX_LAYERS) or 4
    fields.note(
        f"{fields.name('no_rope_layers')} is empty or left out: every {interval}th layer has no rope and is "
        "full, as the class sets it."
    )
    return ["full" if (index + 1) % interval == 0 else "chunked" for index in range(layers)]


def _cross(fields: Fields, layers: int) -> list[str] | None:
    chosen = fields.indices("cross_attention_layers", layers)
    if not chosen:
        return None
    fields.note(f"{len(chosen)} layers attend to images: their KV is not counted.")
    return ["none" if index in chosen else "full" for index in range(layers)]


#: Each key that says which layers keep what, and how to read it: lists first, then rules.
LAYER_SOURCES: tuple[tuple[str, Reader], ...] = (
    ("layer_types", _list_of("layer_types")),
    ("layers_block_type", _list_of("layers_block_type")),
    ("hybrid_override_pattern", _nemotron),
    ("block_configs", _blocks),
    ("linear_attn_config", _kimi),
    ("attn_type_list", _flags("attn_type_list", {0: "linear", 1: "full"})),
    ("hybrid_layer_pattern", _flags("hybrid_layer_pattern", {0: "full", 1: "sliding"})),
    ("local_layer_ids", _indices("local_layer_ids", "sliding", "full")),
    ("attn_layer_indices", _indices("attn_layer_indices", "full", "mamba")),
    ("hybrid_layer_ids", _indices("hybrid_layer_ids", "hybrid", "mamba")),
    ("full_attn_idxs", _indices("full_attn_idxs", "full", "conv")),
    ("cross_attention_layers", _cross),
    ("attention_types", _gpt_neo),
    ("attention_layers", _list_of("attention_layers")),
    ("attn_layer_period", _period),
    ("full_attention_interval", _every("full_attention_interval", "full", "linear")),
    ("layer_group_size", _group_size),
    ("block_types", _repeated("block_types", local=True)),
    ("mixer_types", _repeated("mixer_types", local=False)),
    ("full_attention_layers", _full_attention_layers),
    ("attention_chunk_size", _chunked),
    ("sliding_window_pattern", _pattern("sliding_window_pattern")),
    ("_sliding_window_pattern", _pattern("_sliding_window_pattern")),
    ("global_attn_every_n_layers", _pattern("global_attn_every_n_layers")),
)
