"""From a configuration's keys to a model's geometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvarena.plugin.commands.plan.class_defaults import class_defaults
from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.fields import MAX_LAYERS, MAX_TOKENS, Fields, Notes
from kvarena.plugin.commands.plan.geometry import LayerCache, ModelGeometry, Span
from kvarena.plugin.commands.plan.indexers import index_rows
from kvarena.plugin.commands.plan.kinds import (
    HEAD_KEYS,
    LAYER_COUNT_KEYS,
    LayerKind,
    count_layers,
    layer_kinds,
)
from kvarena.plugin.commands.plan.kv_dtype import stated_kv_dtype
from kvarena.plugin.commands.plan.refused import refuse_unplanned
from kvarena.plugin.commands.plan.rows import RowReader
from kvarena.plugin.commands.plan.sglang_layers import SglangCount, architectures_of, count_as_sglang
from kvarena.plugin.commands.plan.states import state_dtype, state_shape
from kvarena.plugin.commands.plan.text import printable

__all__ = ["ReadModel", "geometry_from_config", "read_model"]

#: Names under which multimodal files keep their language model, the commonest first.
_TEXT_BLOCKS = ("text_config", "language_config", "llm_config", "language_model_config", "thinker_config")
_OTHER_TOWERS = ("vision", "audio", "image", "video", "speech", "projector", "encoder", "talker", "quant")


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A geometry and the keys that it came from, for whoever wants more of them."""

    geometry: ModelGeometry
    fields: Fields
    kinds: tuple[LayerKind, ...]
    top: Mapping[str, Any]
    sglang: SglangCount | None = None


def geometry_from_config(config: Mapping[str, Any]) -> ModelGeometry:
    """A model's geometry, by its architecture alone. See `read_model`."""
    return read_model(config).geometry


def read_model(config: Mapping[str, Any], *, sglang: str | None = None) -> ReadModel:
    """Read a Hugging Face configuration.

    The keys decide, whatever the model is called. Where they are silent, the class's default is
    taken and noted; where nothing can be known, the key is named.

    Parameters
    ----------
    config : Mapping
        The file.
    sglang : str, optional
        Count the layers that this release of SGLang allocates, and for as long as it keeps them; by
        default what the architecture needs.

    Raises
    ------
    ModelConfigError
        A key that is missing, contradictory, of the wrong type or out of range.
    """
    notes = Notes()
    fields = _text_fields(config, notes)
    refuse_unplanned(fields, config)
    layers = count_layers(fields)
    context = _context_len(fields)
    needed = layer_kinds(fields, layers)
    counted = _counted(fields, config, needed, sglang) if sglang is not None else None
    kinds = list(counted.kinds) if counted is not None else _without_long_windows(fields, needed, context)
    rows = RowReader(fields, layers)
    index_keys = index_rows(fields, layers, mla=rows.mla)
    owners = _kv_owners(fields, layers) if counted is None else [True] * layers
    built = []
    for index, kind in enumerate(kinds):
        row = rows.row(index, kind) if kind.attention is not None and owners[index] else None
        built.append(
            LayerCache(
                row=row,
                span=Span(kind.attention) if kind.attention is not None else Span.FULL,
                window=kind.window if row is not None else None,
                index=index_keys[index] if row is not None else None,
                state=state_shape(fields, kind.mixer) if kind.mixer is not None else None,
            )
        )
    if not any(layer.row is not None or layer.state is not None for layer in built):
        raise fields.error("num_hidden_layers", "are all without a cache: there is nothing to plan")
    _remark_unread(fields, layers)
    geometry = ModelGeometry(
        model_type=printable(fields.model_type, 60) or "unnamed",
        layers=tuple(built),
        attention_heads=fields.count(*HEAD_KEYS),
        context_len=context,
        dtype=_dtype(fields, config),
        kv_dtype=stated_kv_dtype(fields, config),
        state_dtype=state_dtype(fields),
        mtp_layers=_mtp_layers(fields),
        notes=tuple(notes.lines),
    )
    return ReadModel(geometry, fields, tuple(kinds), config, counted)


def _counted(fields: Fields, config: Mapping[str, Any], kinds: list[LayerKind], release: str) -> SglangCount:
    """The layers as a release of SGLang counts them, and notes where that differs."""
    owners = _kv_owners(fields, len(kinds), quiet=True)
    found = count_as_sglang(
        architectures_of(config.get("architectures"), str(config.get("model_type", ""))),
        kinds,
        release,
        opted_in=fields.raw("is_hybrid_swa") is True,
        shared_layers=owners.count(False),
    )
    for line in found.notes:
        fields.note(line)
    return found


def _text_fields(config: Mapping[str, Any], notes: Notes) -> Fields:
    """The object that describes the language model, wherever the file keeps it."""
    data, path = config, ""
    for _ in range(3):  # Qwen Omni nests twice
        if (nested := _nested(data, path)) is None:
            break
        path, data = nested
    model_type = data.get("model_type", config.get("model_type", ""))
    if not isinstance(model_type, str):
        raise ModelConfigError("model_type", "is not a string")
    if path and not path.startswith("text_config"):
        notes.add(f"The language model is read from {path}.")
    defaults = class_defaults(model_type, nested=bool(path), stated=data)
    return Fields(data, path=path, notes=notes, defaults=defaults, model_type=model_type)


def _nested(data: Mapping[str, Any], path: str) -> tuple[str, Mapping[str, Any]] | None:
    for key in _TEXT_BLOCKS:
        value = data.get(key)
        if isinstance(value, Mapping):
            return (f"{path}.{key}" if path else key), value
        if value is not None:
            raise ModelConfigError(f"{path}.{key}" if path else key, "must be an object")
    if _describes_layers(data):
        return None
    others = [
        key
        for key, value in data.items()
        if isinstance(value, Mapping)
        and _describes_layers(value)
        and not any(word in key.lower() for word in _OTHER_TOWERS)
    ]
    if len(others) > 1:
        raise ModelConfigError(
            others[0],
            f"and {others[1]} both describe layers, and nothing says which is the language model",
            fix="Give the language model's own configuration.",
        )
    if not others:
        return None
    return (f"{path}.{others[0]}" if path else others[0]), data[others[0]]


def _describes_layers(data: Mapping[str, Any]) -> bool:
    return any(data.get(key) is not None for key in (*LAYER_COUNT_KEYS, "layers_block_type"))


def _kv_owners(fields: Fields, layers: int, *, quiet: bool = False) -> list[bool]:
    """Layers that keep their own KV, and not another layer's; `quiet` leaves the notes out."""
    shared = fields.count("num_kv_shared_layers", "num_kv_reuse_layers", minimum=0, maximum=MAX_LAYERS) or 0
    if shared >= layers:
        raise fields.error("num_kv_shared_layers", f"is {shared} of {layers} layers: none would keep KV")
    if shared and not quiet:
        fields.note(f"The last {shared} layers use earlier layers' KV: not counted.")
    owners = [index < layers - shared for index in range(layers)]
    if fields.flag("use_cla"):
        every = fields.need("cla_share_factor", why="use_cla is true")
        if not quiet:
            fields.note(f"Cross-layer attention: one layer in {every} keeps KV.")
        owners = [owner and index % every == 0 for index, owner in enumerate(owners)]
    return owners


def _context_len(fields: Fields) -> int | None:
    keys = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
    for key in keys:
        if fields.stated(key):
            return fields.count(key, maximum=MAX_TOKENS)
    return None


#: Lists about layers that say nothing of what these keep, and words in the names of others.
_HARMLESS = (
    *("activation_sparsity_pattern", "eagle_aux_hidden_state_layer_ids", "intermediate_size"),
    *("num_attention_heads_per_layer", "num_query_heads", "target_layer_ids"),
)
_HARMLESS_WORDS = ("expert", "ffn", "mlp", "moe", "rope", "swiglu", "token")
#: With fewer layers than this, a list of as many entries is likely to be about something else.
_FEW_LAYERS = 8


def _remark_unread(fields: Fields, layers: int) -> None:
    """Name what looks like a schedule of layers and was not understood: the next model's key, perhaps."""
    listed = fields.unread_lists(layers) if layers >= _FEW_LAYERS else []
    for key in [*listed, *fields.unread_indices(layers)]:
        if key not in _HARMLESS and not any(word in key for word in _HARMLESS_WORDS):
            what = f"has an entry for each of the {layers} layers" if key in listed else "names layers"
            fields.note(
                f"{fields.name(key)[:80]} {what} and is not read here: "
                "if it changes what they keep, the plan is wrong."
            )


def _without_long_windows(fields: Fields, kinds: list[LayerKind], context: int | None) -> list[LayerKind]:
    """A window as long as the context never drops a token: its layers count as full."""
    long = {kind.window for kind in kinds if kind.window is not None and context and kind.window >= context}
    if not long:
        return kinds
    fields.note(
        f"The window of {min(long)} tokens is as long as the context of {context}: it never drops any, and "
        "its layers count as full."
    )
    return [replace(kind, attention="full", window=None) if kind.window in long else kind for kind in kinds]


def _dtype(fields: Fields, config: Mapping[str, Any]) -> str | None:
    for key in ("dtype", "torch_dtype"):
        if fields.stated(key):
            return fields.text(key)
        outer = config.get(key)
        if isinstance(outer, str):
            return outer
    return None


def _mtp_layers(fields: Fields) -> int:
    count = (
        fields.count("num_nextn_predict_layers", "mtp_num_hidden_layers", minimum=0, maximum=MAX_LAYERS) or 0
    )
    if count:
        fields.note(
            f"Layers for multi-token prediction ({count}) are not counted; an engine that drafts with them "
            "adds them."
        )
    return count
