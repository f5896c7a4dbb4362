"""The dtype that a quantized model's file wants its KV cache in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarena.plugin.commands.plan.fields import Fields

__all__ = ["quantization_of", "stated_kv_dtype"]


def quantization_of(fields: Fields, top: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a model is quantized: its own object's word, then the whole file's, by either spelling."""
    for key in ("quantization_config", "compression_config"):
        found = fields.raw(key) or top.get(key)
        if found:
            return found if isinstance(found, dict) else None
    return None


def stated_kv_dtype(fields: Fields, top: Mapping[str, Any]) -> str | None:
    """``"fp8_e4m3"`` where the file's scales are for an fp8 cache, else ``None``.

    SGLang's ``--kv-cache-dtype auto`` follows the same keys (0.5.17 to 0.5.23): a
    ``kv_cache_quant_algo`` of FP8, or a ``kv_cache_scheme`` of static 8-bit floats. Other schemes
    leave the cache in the model's dtype there, and a note says so here.
    """
    quantization = quantization_of(fields, top)
    if quantization is None:
        return None
    scheme = quantization.get("kv_cache_scheme")
    if scheme is None:
        scheme = quantization.get("kv_cache_quant_algo")
    if scheme is None:
        return None
    if _is_fp8(scheme):
        return "fp8_e4m3"
    fields.note("quantization_config names a KV cache scheme that is not known here: see --kv-cache-dtype.")
    return None


def _is_fp8(scheme: object) -> bool:
    if isinstance(scheme, str):
        return scheme.strip().upper() in ("FP8", "FLOAT8")
    return (
        isinstance(scheme, Mapping)
        and scheme.get("type") == "float"
        and scheme.get("num_bits") == 8
        and scheme.get("dynamic", False) is False
        and scheme.get("strategy", "tensor") == "tensor"
    )
