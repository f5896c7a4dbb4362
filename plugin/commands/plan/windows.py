"""How many tokens a windowed layer keeps, and when a stated window is switched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvarena.plugin.commands.plan.fields import MAX_TOKENS, Fields

__all__ = ["WindowRule", "chunk_size", "sliding_window"]

_WINDOW_KEYS = ("sliding_window", "sliding_window_size", "attention_window_size")


@dataclass(frozen=True, slots=True)
class WindowRule:
    """One window for all layers, one for each, or none."""

    tokens: int | None = None
    per_layer: Sequence[int | None] | None = None

    @property
    def on(self) -> bool:
        return self.tokens is not None or any(self.per_layer or ())

    def at(self, layer: int) -> int | None:
        """Tokens that a layer keeps, or ``None`` for all."""
        if self.per_layer is not None:
            return self.per_layer[layer] if layer < len(self.per_layer) else None
        return self.tokens


def sliding_window(fields: Fields, layers: int, *, needed: bool) -> WindowRule:
    """The sliding window of a model.

    A window that is ``null``, 0 or negative is a switch: the layers that would slide keep every
    token. It never makes a size.

    Parameters
    ----------
    layers : int
        Layers of the model.
    needed : bool
        Whether some layers are known to slide, so that silence is an error.
    """
    if fields.stated("use_sliding_window") and not fields.flag("use_sliding_window"):
        if needed:
            fields.note(f"{fields.name('use_sliding_window')} is false: sliding layers keep every token.")
        return WindowRule()
    if fields.stated("block_configs"):
        return WindowRule(per_layer=_block_windows(fields))
    neo = "attention_types" in fields or "attention_layers" in fields
    keys = (*_WINDOW_KEYS, "window_size") if neo else _WINDOW_KEYS
    key = next((name for name in keys if name in fields), None)
    if key is None:
        key = next((name for name in keys if fields.has_default(name)), None)
        if key is None:
            if needed:
                fields.need(*keys, why="some layers slide")
            return WindowRule()
    value = fields.raw(key)
    if isinstance(value, (list, tuple)):
        return WindowRule(per_layer=_window_list(fields, key, value, layers))
    if value is None:
        if needed:
            fields.note(f"{fields.name(key)} is null: no window, sliding layers keep every token.")
        return WindowRule()
    tokens = fields.whole(key, value, minimum=-MAX_TOKENS, maximum=MAX_TOKENS)
    _check_spellings(fields, key, tokens)
    if tokens <= 0:
        fields.note(f"{fields.name(key)} is {tokens}: taken as no window, every layer keeps every token.")
        return WindowRule()
    if fields.has_default("use_sliding_window") and not fields.flag("use_sliding_window"):
        return WindowRule()
    return WindowRule(tokens)


def chunk_size(fields: Fields, *, needed: bool) -> WindowRule:
    """The chunk of chunked attention, with the same switch."""
    key = "attention_chunk_size"
    value = fields.raw(key)
    if value is None:
        if needed and key not in fields:
            fields.need(key, why="some layers are chunked")
        if needed:
            fields.note(f"{fields.name(key)} is null: no chunks, every layer keeps every token.")
        return WindowRule()
    tokens = fields.whole(key, value, minimum=-MAX_TOKENS, maximum=MAX_TOKENS)
    if tokens <= 0:
        fields.note(f"{fields.name(key)} is {tokens}: taken as no chunks, every layer keeps every token.")
        return WindowRule()
    return WindowRule(tokens)


def _check_spellings(fields: Fields, key: str, tokens: int) -> None:
    for other in _WINDOW_KEYS:
        if other == key or not fields.stated(other):
            continue
        value = fields.whole(other, fields.raw(other), minimum=-MAX_TOKENS, maximum=MAX_TOKENS)
        if value == tokens:
            continue
        if tokens > 0:
            raise fields.error(
                other, f"is {value} but {fields.name(key)} is {tokens}", fix="Remove the one that is wrong."
            )
        fields.note(f"{fields.name(other)} is {value}, but {fields.name(key)} decides.")


def _window_list(fields: Fields, key: str, values: Sequence[object], layers: int) -> list[int | None]:
    if len(values) != layers:
        raise fields.error(key, f"has {len(values)} entries for {layers} layers")
    found: list[int | None] = []
    for value in values:
        tokens = None if value is None else fields.whole(key, value, minimum=-MAX_TOKENS, maximum=MAX_TOKENS)
        if tokens is not None and tokens <= 0:
            fields.note(f"{fields.name(key)} holds {tokens}: taken as no window for those layers.")
            tokens = None
        found.append(tokens)
    return found


def _block_windows(fields: Fields) -> list[int | None]:
    found: list[int | None] = []
    for value in fields.items("block_configs") or ():
        attention = value.get("attention") if isinstance(value, dict) else None
        length = attention.get("window_length") if isinstance(attention, dict) else None
        found.append(None if length is None else fields.whole("block_configs", length, maximum=MAX_TOKENS))
    return found
