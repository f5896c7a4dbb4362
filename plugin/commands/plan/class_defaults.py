"""What a model's class assumes for keys that its published files leave out.

transformers itself is asked where it is installed (`transformers_defaults`). The table here is the
fallback, read from the configuration classes of transformers 5.12.1 and checked against 5.19
(``tests/plugin/commands/plan/test_transformers_defaults.py``), and kept to what decides the size of a
cache and is known to be left out. A number of layers is assumed only for an object inside a wrapper's
file (`class_sizes`): a whole model's file without it is broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvarena.plugin.commands.plan.class_sizes import SIZE_KEYS, class_sizes
from kvarena.plugin.commands.plan.transformers_defaults import transformers_defaults

__all__ = ["class_defaults", "is_known_decoder"]

_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_DSA = {**_MLA, "index_topk": 2048, "index_head_dim": 128}
_DELTA_NET = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_QWEN = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA2 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_PER_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
_MAMBA2_BLOCK = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_MAMBA1 = {"state_size": 16, "conv_kernel": 4, "expand": 2}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {"head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4},
    "bitnet": {"num_key_value_heads": 5},
    "bamba": {**_MAMBA2_BLOCK, "num_key_value_heads": 8},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "cohere2_moe": {"head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4},
    "csm": {"num_key_value_heads": 8},
    "cwm": {"num_key_value_heads": 8, "sliding_window": 8192, "sliding_window_pattern": 4},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _DSA,
    "diffusion_gemma_text": {**_GEMMA3, "sliding_window": 512, "global_head_dim": 512},
    "dots1": {"sliding_window": 4096, "max_window_layers": 62},
    "emu3_text_model": {"num_key_value_heads": 8},
    "ernie4_5": {"head_dim": 128, "num_key_value_heads": 2},
    "ernie4_5_moe": {"num_key_value_heads": 4},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone_moe": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "falcon_h1": {**_MAMBA2_BLOCK, "mamba_d_ssm": 1024, "num_key_value_heads": 8},
    "falcon_mamba": _MAMBA1,
    "gemma": {"head_dim": 256},
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {
        **_GEMMA3,
        "num_key_value_heads": 2,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "num_kv_shared_layers": 15,
        **_PER_LAYER,
    },
    "gemma4_text": {**_GEMMA3, **_PER_LAYER, "sliding_window": 512, "global_head_dim": 512},
    "gemma4_unified_text": {**_GEMMA3, "sliding_window": 1024, "global_head_dim": 512},
    "glm": {"num_key_value_heads": 2},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2},
    "glm4_moe": {"num_key_value_heads": 8},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _DSA,
    "glm_ocr_text": {"num_key_value_heads": 8},
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    "granite_swa": {"sliding_window": 128, "sliding_window_pattern": 4},
    "granitemoe_swa": {"sliding_window": 128, "sliding_window_pattern": 4},
    "granitemoehybrid": _MAMBA2_BLOCK,
    "helium": {"head_dim": 128},
    "hy_v3": {"head_dim": 128, "num_key_value_heads": 8},
    "jamba": {
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "jetmoe": {"num_key_value_heads": 16, "kv_channels": 128},
    "lfm2": {"num_key_value_heads": 8, "conv_L_cache": 3},
    "lfm2_moe": {"num_key_value_heads": 8, "conv_L_cache": 3},
    "llama4_text": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    },
    "longcat_flash": _MLA,
    "mamba": _MAMBA1,
    "mamba2": {"head_dim": 64, "state_size": 128, "conv_kernel": 4, "n_groups": 8, "expand": 2},
    "minimax": {"num_key_value_heads": 8},
    "minimax_m2": {"head_dim": 128, "num_key_value_heads": 8},
    "minimax_m3_vl_text": {"head_dim": 128, "num_key_value_heads": 4},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {"head_dim": 128, "num_key_value_heads": 8},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mistral4": {"kv_lora_rank": 256, "qk_rope_head_dim": 64},
    "mixtral": {"num_key_value_heads": 8},
    "mllama_text_model": {
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    "modernbert-decoder": {"global_attn_every_n_layers": 3},
    "muse_glimmer_text": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "sliding_window": 2048,
        "sliding_window_pattern": 4,
    },
    "nemotron_h": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
    },
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "paddleocr_vl_text": {"head_dim": 128, "num_key_value_heads": 2},
    "phi4_multimodal": {"num_key_value_heads": 8},
    "phimoe": {"num_key_value_heads": 8},
    "qwen2": _QWEN,
    "qwen2_5_omni_text": {**_QWEN, "num_key_value_heads": 4},
    "qwen2_5_vl_text": {**_QWEN, "max_window_layers": 80, "num_key_value_heads": 8},
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {**_QWEN, "num_key_value_heads": 4},
    "qwen3_omni_moe_text": {"num_key_value_heads": 4},
    "qwen3_5_moe_text": {**_DELTA_NET, "num_key_value_heads": 2},
    "qwen3_5_text": {**_DELTA_NET, "num_key_value_heads": 4},
    "qwen3_next": {**_DELTA_NET, "num_key_value_heads": 2},
    "recurrent_gemma": {
        "attention_window_size": 2048,
        "conv1d_width": 4,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "solar_open": {"head_dim": 128, "num_key_value_heads": 8},
    "smollm3": {**_QWEN, "num_key_value_heads": 4},
    "vaultgemma": _GEMMA2,
    "voxtral_realtime_text": {"num_key_value_heads": 8, "sliding_window": 4096},
    "starcoder2": {"num_key_value_heads": 2},
    "youtu": _MLA,
    "zamba": {"n_mamba_heads": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    "zamba2": {
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
    },
}

#: Classes that build on another's configuration.
_LIKE = {
    "cohere2_vision": "cohere2",
    "ernie4_5_vl_moe_text": "ernie4_5_moe",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm",
    "glm_image_text": "glm",
    "kimi_k2": "deepseek_v3",
    "llama4": "llama4_text",
    "qwen2_5_vl": "qwen2",
    "qwen2_moe": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def is_known_decoder(model_type: str) -> bool:
    """Whether this is a class of decoders whose defaults are known here."""
    return model_type in _DEFAULTS or model_type in _LIKE or bool(class_sizes(model_type))


#: What transformers is asked for: every key that decides the size of some family's cache.
_ASKED = frozenset(key for keys in _DEFAULTS.values() for key in keys) | {"layer_types"}


def class_defaults(
    model_type: str, *, nested: bool = False, stated: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Defaults of a model type; empty for one that is not known.

    Parameters
    ----------
    model_type : str
        As in the file.
    nested : bool
        Whether the object stands inside a wrapper's file, which leaves out whatever is the default.
    stated : Mapping, optional
        The file's own keys: with them transformers is asked, where it is installed.
    """
    table = _DEFAULTS.get(_LIKE.get(model_type, model_type), {})
    table = {**class_sizes(model_type), **table} if nested else table
    found = None if stated is None else transformers_defaults(model_type, stated)
    if found is None:
        return MappingProxyType(table)
    asked = _ASKED.union(SIZE_KEYS) if nested else _ASKED
    if stated is not None and ("kv_lora_rank" in found or "kv_lora_rank" in stated):
        asked = asked - {"head_dim"}  # there it is the size of the part with rope
    return MappingProxyType({**table, **{key: found[key] for key in asked if key in found}})
