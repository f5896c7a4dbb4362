"""Families that keep a state per request; every number is worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.geometry import StateShape
from kvarena.plugin.commands.plan.read import geometry_from_config

BASE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
}
GRANITE = {
    **BASE,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

# name, configuration, (full B/token, state B/request in fp32 with bf16 convolutions)
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    # Attention in layers 4, 12, 20, 28; 28 Mamba 1 layers of 8192 channels, state 16.
    "jamba": (
        {
            "model_type": "jamba",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        (4 * 4096, 28 * (8192 * 3 * 2 + 8192 * 16 * 4)),
    ),
    # 1.5B: every layer has both. 48 heads of 64, state 256: 72 MiB of temporal state, as a run printed.
    "falcon-h1": (
        {
            "model_type": "falcon_h1",
            "hidden_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_hidden_layers": 24,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        (24 * 1024, 24 * (3072 + 512) * 3 * 2 + (72 << 20)),
    ),
    # Indices instead of words; 128 heads made by "auto" from 2 x 4096.
    "bamba": (
        {
            "model_type": "bamba",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "attn_layer_indices": [9, 18, 27],
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        (3 * 4096, 29 * ((8192 + 256) * 3 * 2 + 128 * 64 * 128 * 4)),
    ),
    # 7B: 81 Mamba 2 layers, 13 of them with shared attention of 32 heads of 224.
    "zamba 2": (
        {
            "model_type": "zamba2",
            "hidden_size": 3584,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "attention_head_dim": 224,
            "kv_channels": 112,
            "num_hidden_layers": 81,
            "layers_block_type": ["mamba"] * 68 + ["hybrid"] * 13,
            "hybrid_layer_ids": list(range(68, 81)),
            "n_mamba_heads": 112,
            "mamba_headdim": 64,
            "mamba_ngroups": 2,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        (13 * 32 * 448 * 2, 81 * ((7168 + 256) * 3 * 2 + 112 * 64 * 64 * 4)),
    ),
    # 6 attention layers of 8 heads of 64; 10 convolutions that keep 2 past inputs, and nothing else.
    "lfm 2 by indices": (
        {
            "model_type": "lfm2",
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 16,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "conv_L_cache": 3,
        },
        (6 * 2048, 10 * 2048 * 2 * 2),
    ),
    "lfm 2 vl, nested, by words": (
        {
            "model_type": "lfm2_vl",
            "text_config": {
                "model_type": "lfm2",
                "hidden_size": 2048,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "num_hidden_layers": 4,
                "layer_types": ["conv", "conv", "full_attention", "conv"],
                "conv_L_cache": 3,
            },
        },
        (2048, 3 * 8192),
    ),
    # 1 in 8 is softmax; a lightning layer keeps a 128 x 128 square for each of 64 heads.
    "minimax": (
        {
            "model_type": "minimax_text_01",
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 80,
            "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
        },
        (10 * 4096, 70 * 64 * 128 * 128 * 4),
    ),
    # Counted from 1; MLA in 7 layers, delta attention with 3 convolved parts of 4096 in 20.
    "kimi linear": (
        {
            "model_type": "kimi_linear",
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 72,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "num_hidden_layers": 27,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        (7 * 1152, 20 * (3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4)),
    ),
    "qwen 3.5, nested, by words": (
        {
            "model_type": "qwen3_5",
            "text_config": {
                **BASE,
                "model_type": "qwen3_5_text",
                "head_dim": 256,
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
                * 2,
                "full_attention_interval": 4,
                "linear_num_key_heads": 16,
                "linear_key_head_dim": 128,
                "linear_num_value_heads": 48,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
            },
        },
        (2 * 4096, 6 * ((48 * 128 + 2 * 16 * 128) * 3 * 2 + 48 * 128 * 128 * 4)),
    ),
    "ring 2.5: lightning in groups, latent else": (
        {
            **BASE,
            "model_type": "bailing_hybrid",
            "layer_group_size": 4,
            "head_dim": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        (2 * 1152, 6 * 16 * 128 * 128 * 4),
    ),
    "granite": (GRANITE, (2 * 2048, 6 * ((4096 + 256) * 3 * 2 + 64 * 64 * 128 * 4))),
    "nemotron 3 by words, without a count": (
        {
            "model_type": "nemotron_h",
            "hidden_size": 2688,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        },
        (1024, (4096 + 8 * 256) * 3 * 2 + 64 * 64 * 128 * 4),
    ),
    "mamba 2, no attention": (
        {
            "model_type": "mamba2",
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "expand": 2,
        },
        (0, 64 * ((8192 + 8 * 256) * 3 * 2 + 128 * 64 * 128 * 4)),
    ),
    "falcon mamba, no attention": (
        {
            "model_type": "falcon_mamba",
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "num_hidden_layers": 64,
            "state_size": 16,
            "conv_kernel": 4,
        },
        (0, 64 * (8192 * 3 * 2 + 8192 * 16 * 4)),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_per_token_and_per_request(name, rank):
    config, (full_bytes, state_bytes) = FAMILIES[name]
    built = rank(config)
    full = built.get("full")
    assert (full.entry_bytes if full else 0) == full_bytes
    assert built.state_pool.entry_bytes == state_bytes


def test_recurrent_gemma_keeps_windows_and_channels(rank):
    # Layers 2, 5, ... 23 of 26 are local attention with one head of 256.
    built = rank(
        {
            "model_type": "recurrent_gemma",
            "hidden_size": 2560,
            "num_attention_heads": 10,
            "num_key_value_heads": 1,
            "num_hidden_layers": 26,
            "block_types": ["recurrent", "recurrent", "attention"],
            "attention_window_size": 2048,
            "conv1d_width": 4,
            "lru_width": 2560,
        }
    )
    window = built.get("swa")
    assert (window.entry_bytes, window.window, len(window.layers)) == (8 * 1024, 2048, 8)
    assert built.state_pool.entry_bytes == 18 * (2560 * 3 * 2 + 2560 * 4)
    assert built.get("full") is None


def test_the_state_dtype_is_the_file_s_or_float32():
    assert geometry_from_config(GRANITE).state_dtype is None
    assert geometry_from_config({**GRANITE, "mamba_ssm_dtype": "bfloat16"}).state_dtype == "bfloat16"
    assert geometry_from_config({**GRANITE, "mamba_ssm_cache_dtype": "float32"}).state_dtype == "float32"


def test_the_inner_width_is_heads_times_their_size(rank):
    # Nemotron 3: expand x hidden would be 5376, the heads make 4096.
    config = FAMILIES["nemotron 3 by words, without a count"][0]
    state = next(layer.state for layer in geometry_from_config({**config, "expand": 2}).layers if layer.state)
    assert state == StateShape("mamba2", 4096, 8, 256, 3, 64, 64 * 128)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"layer_types": None}, "layer_types"),
        ({"mamba_d_state": None}, "mamba_d_state"),
        ({"mamba_d_conv": "4"}, "mamba_d_conv"),
        ({"mamba_n_heads": 0}, "mamba_n_heads"),
        ({"mamba_n_groups": 7}, "mamba_n_groups"),
        ({"layer_types": ["mamba", "retention"] * 4}, "layer_types"),
        ({"layer_types": ["mamba", "linear_attention"] * 4}, "linear_num_value_heads"),
        ({"layer_types": ["mamba", "attention"] * 3}, "layer_types"),
    ],
)
def test_a_state_that_cannot_be_known_is_refused_by_key(change, key):
    config = {**GRANITE, "model_type": "some-hybrid", **change}
    with pytest.raises(ModelConfigError) as caught:
        geometry_from_config({name: value for name, value in config.items() if value is not None})
    assert caught.value.key == key
