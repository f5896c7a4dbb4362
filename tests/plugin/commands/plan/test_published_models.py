"""Eighteen published configurations against numbers derived without this code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvarena.plugin.commands.plan.errors import GeometryError
from kvarena.plugin.commands.plan.geometry import KVRow, MLARow
from kvarena.plugin.commands.plan.load import load_config
from kvarena.plugin.commands.plan.read import geometry_from_config, read_model
from kvarena.plugin.commands.plan.weights import estimate_weights

EXPECTED = json.loads((Path(__file__).parent / "data" / "expected.json").read_text())
TP_CASES = [
    (name, int(tp[2:]), heads)
    for name, facts in EXPECTED.items()
    for tp, heads in facts.get("kv_heads_per_rank", {}).items()
]


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_by_kind(name, config):
    counts = geometry_from_config(config(name)).layer_counts()
    assert {kind: counts[kind] for kind in ("full", "sliding", "chunked", "linear")} == {
        kind: EXPECTED[name][f"{kind}_layers"] for kind in ("full", "sliding", "chunked", "linear")
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_per_token_of_each_sub_pool(name, config, rank):
    facts, built = EXPECTED[name], rank(config(name))
    full = built.get("full")
    assert (full.entry_bytes if full else 0) == facts["bytes_per_token_all_full_layers"]
    window = built.get("swa") or built.get("chunked")
    assert (window.entry_bytes if window else None) == facts.get("bytes_per_token_all_window_layers")
    assert (window.window if window else None) == facts.get("window")
    if "mla" in facts:
        latent = facts["mla"]
        assert full.row == MLARow(latent["kv_lora_rank"], latent["qk_rope_head_dim"])
        assert set(full.layer_bytes) == {latent["bytes_per_token_per_layer"]}
    for pool, key in ((full, "full_attention"), (window, "window_attention")):
        if pool is not None and key in facts:
            row = facts[key]
            assert pool.row == KVRow(row["kv_heads"], row["head_dim_k"], row["head_dim_v"])
            assert set(pool.layer_bytes) == {row["bytes_per_token_per_layer"]}


@pytest.mark.parametrize("name", [name for name, facts in EXPECTED.items() if "linear_state" in facts])
def test_bytes_per_request_of_the_states(name, config, rank):
    facts = EXPECTED[name]["linear_state"]
    states = [layer.state for layer in geometry_from_config(config(name)).layers if layer.state]
    assert len(states) == facts["layers"]
    assert {state.conv_elements(1) for state in states} == {facts["conv_elements_per_layer"]}
    assert {state.temporal_elements(1) for state in states} == {facts["temporal_elements_per_layer"]}
    single = rank(config(name)).get("mamba")
    assert single.entry_bytes == facts["state_bytes_per_request_fp32_temporal"]
    half = rank(config(name), temporal="bfloat16").get("mamba")
    assert half.entry_bytes == facts["state_bytes_per_request_bf16_temporal"]
    assert single.page_bytes(64) == single.entry_bytes


@pytest.mark.parametrize(("name", "tp", "heads"), TP_CASES)
def test_kv_heads_of_one_rank(name, tp, heads, config, rank):
    if heads is None:
        kv_heads = EXPECTED[name]["full_attention"]["kv_heads"]
        with pytest.raises(GeometryError, match=rf"num_key_value_heads is {kv_heads}\b.*size {tp}\b"):
            rank(config(name), tp=tp)
        return
    assert {pool.row.kv_heads for pool in rank(config(name), tp=tp).token_pools} == {heads}


@pytest.mark.parametrize("name", [name for name, facts in EXPECTED.items() if "mla" in facts])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_latent_is_the_same_on_every_rank(name, tp, config, rank):
    assert (
        rank(config(name), tp=tp).get("full").entry_bytes == EXPECTED[name]["bytes_per_token_all_full_layers"]
    )


@pytest.mark.parametrize(
    ("name", "tp", "conv", "temporal"),
    [
        # 16384 channels and 8 groups of 2 x 256, over 4 ranks; 64 heads of 64 x 256.
        ("nemotron-h-56b", 4, (4096 + 2 * 512) * 3, 64 * 64 * 256),
        # 8 groups on 16 ranks: each rank keeps one.
        ("nemotron-h-56b", 16, (1024 + 512) * 3, 16 * 64 * 256),
        ("qwen3-next-80b-a3b", 2, (2048 + 8 * 256) * 3, 16 * 128 * 128),
        # One group is needed by all.
        ("granite-4.0-h-tiny", 4, (768 + 256) * 3, 12 * 64 * 128),
    ],
)
def test_states_are_split_over_ranks(name, tp, conv, temporal, config):
    state = next(layer.state for layer in geometry_from_config(config(name)).layers if layer.state)
    assert (state.conv_elements(tp), state.temporal_elements(tp)) == (conv, temporal)


def test_layers_for_multi_token_prediction_are_named_and_not_counted(config):
    model = geometry_from_config(config("deepseek-v3"))
    assert (len(model.layers), model.mtp_layers) == (61, EXPECTED["deepseek-v3"]["mtp_layers"])
    assert any("multi-token prediction (1)" in note for note in model.notes)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-70b", 70.55),
        ("qwen2.5-7b", 7.62),
        ("qwen3-32b", 32.76),
        ("gemma-2-9b", 9.24),
        ("gemma-3-1b", 1.0),
        ("mistral-7b-v0.1", 7.24),
        ("deepseek-v3", 671),
        ("deepseek-v2-lite", 15.7),
        ("kimi-k2.5", 1026),
        ("gpt-oss-20b", 20.9),
        ("llama-4-scout", 107.8),
        ("minicpm3-4b", 4.07),
        ("qwen3-next-80b-a3b", 79.7),
        ("granite-4.0-h-tiny", 6.94),
        ("nemotron-3-nano-30b", 31.6),
        ("nemotron-h-56b", 56.3),
    ],
)
def test_estimated_parameters_agree_with_the_published_count(name, billions, config_file):
    estimate = estimate_weights(read_model(load_config(config_file(name))))
    assert estimate.parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "nbytes", "words"),
    [("gpt-oss-20b", 13.76e9, "mxfp4"), ("deepseek-v3", 674e9, "fp8"), ("qwen2.5-7b", 15.23e9, "16 bits")],
)
def test_estimated_bytes_follow_the_quantization(name, nbytes, words, config_file):
    estimate = estimate_weights(read_model(load_config(config_file(name))))
    assert estimate.total == pytest.approx(nbytes, rel=0.01)
    assert words in estimate.bits
