"""Keys that say what layers are, each in the shape in which a family writes it."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.read import geometry_from_config

#: 16 heads of 64 over 4 KV heads: 1024 B a layer.
PLAIN: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
}
DELTA_NET: dict[str, Any] = {
    **PLAIN,
    "model_type": "gigachat3_5",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
KDA: dict[str, Any] = {**PLAIN, "model_type": "glm5_next_text", "kv_lora_rank": 512, "qk_rope_head_dim": 0}
LONGCAT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "zero_expert_num": 256,
}


def pools(rank, config):
    return {pool.name: (pool.layers, pool.entry_bytes) for pool in rank(config).sub_pools}


def test_full_attention_layers_among_linear_ones(rank):
    built = pools(rank, {**DELTA_NET, "full_attention_layers": [3, 7]})
    assert built["full"] == ((3, 7), 2 * 1152)
    # 16 x 128 values, 8 x 128 queries and keys, 3 taps in bf16; 16 squares of 128 in fp32.
    assert built["mamba"] == ((0, 1, 2, 4, 5, 6), 6 * ((2048 + 2048) * 3 * 2 + 16 * 128 * 128 * 4))


def test_full_attention_layers_among_windows(rank):
    built = pools(rank, {**PLAIN, "sliding_window": 64, "full_attention_layers": [7]})
    assert built == {"swa": ((0, 1, 2, 3, 4, 5, 6), 7168), "full": ((7,), 1024)}


def test_full_attention_layers_alone_do_not_say_what_the_others_are():
    with pytest.raises(ModelConfigError, match="full_attention_layers names 2 of 8 layers"):
        geometry_from_config({**PLAIN, "full_attention_layers": [3, 7]})


def test_mixers_repeat_and_lightning_has_heads_of_its_own(rank):
    config = {
        **PLAIN,
        "model_type": "minicpm_sala",
        "mixer_types": ["minicpm4", "lightning-attn", "lightning-attn"],
        "lightning_nh": 32,
        "lightning_nkv": 32,
        "lightning_head_dim": 128,
    }
    built = pools(rank, config)
    assert built["full"] == ((0, 3, 6), 3 * 1024)
    assert built["mamba"] == ((1, 2, 4, 5, 7), 5 * 32 * 128 * 128 * 4)


@pytest.mark.parametrize(
    ("full", "kda"), [([4, 8], [1, 2, 3, 5, 6, 7]), ([3, 7], [0, 1, 2, 4, 5, 6])], ids=["from 1", "from 0"]
)
def test_kda_layers_counted_from_1_or_from_0(full, kda, rank):
    block = {"full_attn_layers": full, "kda_layers": kda, "num_heads": 8, "head_dim": 128}
    built = pools(rank, {**KDA, "linear_attn_config": {**block, "short_conv_kernel_size": 4}})
    assert built["full"] == ((3, 7), 2 * 1024)
    assert built["mamba"] == ((0, 1, 2, 4, 5, 6), 6 * (3 * 1024 * 3 * 2 + 8 * 128 * 128 * 4))


def test_kda_layers_that_mix_both_counts_are_refused():
    block = {"full_attn_layers": [4, 8], "kda_layers": [0, 1, 2, 5, 6, 7], "num_heads": 8, "head_dim": 128}
    with pytest.raises(ModelConfigError, match="full_attn_layers"):
        geometry_from_config({**KDA, "linear_attn_config": {**block, "short_conv_kernel_size": 4}})


@pytest.mark.parametrize("layers", [None, 4, 8])
def test_longcat_has_two_attentions_a_block_whatever_its_file_counts(layers, rank):
    config = LONGCAT if layers is None else {**LONGCAT, "num_hidden_layers": layers}
    assert pools(rank, config)["full"] == (tuple(range(8)), 8 * 1152)


def test_longcat_s_counts_must_agree():
    with pytest.raises(ModelConfigError, match="num_hidden_layers is 5, neither num_layers 4 nor twice that"):
        geometry_from_config({**LONGCAT, "num_hidden_layers": 5})


def test_mpt_s_multi_query_attention_has_one_head(rank):
    mpt = {"model_type": "mpt", "d_model": 2048, "n_heads": 16, "n_layers": 4}
    one = {**mpt, "attn_config": {"attn_type": "multiquery_attention"}}
    many = {**mpt, "attn_config": {"attn_type": "multihead_attention"}}
    assert pools(rank, one)["full"][1] == 4 * 2 * 128 * 2
    assert pools(rank, many)["full"][1] == 4 * 2 * 2048 * 2


def test_bloom_s_small_files_spell_the_hidden_size_otherwise(rank):
    bloom = {"model_type": "bloom", "n_layer": 24, "num_attention_heads": 16, "n_embed": 1024}
    assert pools(rank, bloom)["full"][1] == 24 * 4096


@pytest.mark.parametrize("value", [["a", "b"] * 4, [0, 1] * 4, "ABABABAB"])
def test_a_schedule_of_layers_that_is_not_read_is_named(value):
    notes = geometry_from_config({**PLAIN, "cache_plan": value}).notes
    assert any("cache_plan has an entry for each of the 8 layers and is not read" in note for note in notes)


@pytest.mark.parametrize("key", ["sliding_window_layers", "global_attn_idx", "swa_layers", "some_layer_ids"])
def test_indices_of_layers_that_are_not_read_are_named(key):
    notes = geometry_from_config({**PLAIN, key: [0, 7]}).notes
    assert any(f"{key} names layers and is not read" in note for note in notes)


def test_gpt_neo_s_layers_one_by_one(rank):
    words = ["global", "local"] * 4
    assert pools(rank, {**PLAIN, "attention_layers": words, "window_size": 64}) == {
        "swa": ((1, 3, 5, 7), 4096),
        "full": ((0, 2, 4, 6), 4096),
    }
    with pytest.raises(ModelConfigError, match="attention_layers makes layer 0 'full'"):
        geometry_from_config(
            {**PLAIN, "attention_types": [[["local", "global"], 4]], "attention_layers": words}
        )


def test_plamo_s_query_heads_to_a_kv_head(rank):
    plamo = {"model_type": "plamo", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40}
    assert pools(rank, {**plamo, "n_shared_head": 8})["full"][1] == 40 * 2 * 5 * 128 * 2
    with pytest.raises(ModelConfigError, match="n_shared_head is 7"):
        geometry_from_config({**plamo, "n_shared_head": 7})


@pytest.mark.parametrize(
    "change",
    [
        {"cache_plan": ["a"] * 7},
        {"mlp_only_layers": [0, 1]},
        {"moe_layers": [0, 1, 2, 3, 4, 5, 6, 7], "layer_rope_theta": [1.0] * 8},
        {"swa_layers": [0, 900]},
        {"full_attn_layers": []},
        {"layer_types": ["full_attention"] * 8},
        {"mlp_layer_types": ["dense"] * 8},
        {"bad_words_token_ids": [1] * 8},
        {"hidden_act": "gelu_new"},
    ],
)
def test_other_lists_are_not(change):
    notes = geometry_from_config({**PLAIN, **change}).notes
    assert not any("is not read" in note for note in notes)


QWEN = {**PLAIN, "model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 32}


def test_a_window_that_is_switched_on_must_have_a_size(rank):
    with pytest.raises(ModelConfigError, match="sliding_window is missing"):
        geometry_from_config(QWEN)
    assert pools(rank, {**QWEN, "sliding_window": None})["full"][1] == 32 * 1024
    assert pools(rank, {**QWEN, "layer_types": ["full_attention"] * 32})["full"][1] == 32 * 1024


def test_qwen_s_first_28_layers_are_full_where_the_file_does_not_say_how_many(rank):
    built = pools(rank, {**QWEN, "sliding_window": 64})
    assert {name: layers for name, (layers, _) in built.items()} == {
        "swa": (28, 29, 30, 31),
        "full": tuple(range(28)),
    }
    notes = geometry_from_config({**QWEN, "sliding_window": 64}).notes
    assert any("max_window_layers is not in the file: 28, the default of qwen2" in note for note in notes)


@pytest.mark.parametrize("key", ["num_key_value_heads", "num_key_value_heads_per_layer"])
@pytest.mark.parametrize("heads", [32, 5])
def test_heads_of_one_layer_must_divide_the_attention_heads(key, heads):
    config = {name: value for name, value in PLAIN.items() if name != "num_key_value_heads"}
    with pytest.raises(
        ModelConfigError, match=f"^{key} is {heads}, which does not divide the 16 attention heads"
    ):
        geometry_from_config({**config, key: [4] * 7 + [heads]})
