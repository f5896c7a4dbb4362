"""Families that keep rows per token, as their files say it; every number is worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.read import geometry_from_config

S, F = "sliding_attention", "full_attention"


def model(**keys: Any) -> dict[str, Any]:
    """A decoder of 8 layers with 16 heads of 64 over 4 KV heads: 2 x 4 x 64 x 2 B = 1024 B a layer."""
    base = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "max_position_embeddings": 1 << 20,
    }
    merged = {**base, **keys}
    return {key: value for key, value in merged.items() if value != "absent"}


# name, configuration, (full B/token, window B/token, window)
FAMILIES = {
    "mistral with its window off": (model(model_type="mistral", sliding_window=None), (8192, 0, None)),
    "ministral, layer_types": (
        model(model_type="ministral", sliding_window=512, layer_types=[F, S, S, S] * 2),
        (2048, 6144, 512),
    ),
    # 34 layers, every 6th full: 5 and 29; the file leaves heads to the class: 8 over 4 of 256.
    "gemma 3 4b, nested and short": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
        },
        (5 * 4096, 29 * 4096, 1024),
    ),
    # Layers 4 and 9 and so on are full; the last 15 of 35 use earlier ones'.
    "gemma 3n, shared KV": (
        model(
            model_type="gemma3n_text",
            num_hidden_layers=35,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            sliding_window=512,
            num_kv_shared_layers=15,
        ),
        (4 * 2048, 16 * 2048, 512),
    ),
    # Global layers: 2 KV heads of 512, and K = V in the weights only; local: 4 of 256.
    "gemma 4, wide global heads": (
        model(
            model_type="gemma4_text",
            num_hidden_layers=12,
            head_dim=256,
            global_head_dim=512,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            sliding_window=1024,
        ),
        (2 * 4096, 10 * 4096, 1024),
    ),
    "cohere 2, every 4th full": (
        model(model_type="cohere2", sliding_window=4096, sliding_window_pattern=4),
        (2048, 6144, 4096),
    ),
    "exaone 4, letters": (
        model(model_type="exaone4", sliding_window=4096, sliding_window_pattern="LLLG"),
        (2048, 6144, 4096),
    ),
    # 6 layers of LLLGLL: the class keeps the last one global.
    "exaone 4, last layer": (
        model(model_type="exaone4", num_hidden_layers=6, sliding_window=4096, sliding_window_pattern="LLLG"),
        (2048, 4096, 4096),
    ),
    "exaone 4 1.2b, no window": (
        model(model_type="exaone4", sliding_window=None, sliding_window_pattern="LLLG"),
        (8192, 0, None),
    ),
    "olmo 3, layer_types": (
        model(model_type="olmo3", sliding_window=4096, layer_types=[S, S, S, F] * 2),
        (2048, 6144, 4096),
    ),
    "gpt-oss by its class": (
        model(model_type="gpt_oss", head_dim=64, sliding_window=128),
        (4096, 4096, 128),
    ),
    "qwen 2 with its window on": (
        model(model_type="qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=6),
        (6144, 2048, 4096),
    ),
    "llama 4 with stated layers": (
        model(
            model_type="llama4_text",
            head_dim=64,
            attention_chunk_size=256,
            no_rope_layers=[1, 1, 0, 1, 1, 0, 1, 1],
        ),
        (2048, 6144, 256),
    ),
    "phi 3 small, block-sparse": (
        model(model_type="phi3small", dense_attention_every_n_layers=2, blocksparse_block_size=64),
        (8192, 0, None),
    ),
    # Full: 4 heads of 192 + 128; window: 8 of 192 + 128. The chunk size in these files is not for chunks.
    "mimo v2, keys wider than values": (
        model(
            model_type="mimo_v2_flash",
            num_attention_heads=64,
            head_dim=192,
            v_head_dim=128,
            swa_num_key_value_heads=8,
            swa_head_dim=192,
            swa_v_head_dim=128,
            hybrid_layer_pattern=[0, 1, 1, 1, 1, 1, 1, 0],
            sliding_window=128,
            attention_chunk_size=128,
        ),
        (2 * 2560, 6 * 5120, 128),
    ),
    # 3 more entries than layers: the drafts'. Window: 4 groups of 128.
    "step 3.5, other heads in windows": (
        model(
            model_type="step3p5",
            head_dim=128,
            num_key_value_heads="absent",
            num_attention_groups=8,
            attention_other_setting={"num_attention_groups": 4, "head_dim": 128},
            layer_types=[F, S, S, S] * 2 + [S] * 3,
            num_nextn_predict_layers=3,
            sliding_window=512,
        ),
        (2 * 4096, 6 * 2048, 512),
    ),
    "step 3, one group of 256": (
        {
            "model_type": "step3_vl",
            "text_config": model(
                model_type="step3_text", num_key_value_heads="absent", num_attention_groups=1, head_dim=256
            ),
        },
        (8 * 1024, 0, None),
    ),
    "chatglm 4": (
        {
            "model_type": "chatglm",
            "num_layers": 40,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 131072,
        },
        (40 * 1024, 0, None),
    ),
    "falcon 7b, multi-query": (
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
        (32 * 256, 0, None),
    ),
    "falcon 40b, grouped": (
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "num_hidden_layers": 60,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        (60 * 8 * 128 * 2, 0, None),
    ),
    "gpt bigcode by its class": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144},
        (40 * 512, 0, None),
    ),
    # One KV head for each 8 query heads in 3 blocks, each 16 in another; two without attention.
    "nemotron-nas, a record a layer": (
        model(
            model_type="nemotron-nas",
            num_hidden_layers=6,
            num_key_value_heads=None,
            block_configs=[{"attention": {"n_heads_in_group": 8, "no_op": False}}] * 3
            + [{"attention": {"n_heads_in_group": None, "no_op": True}}]
            + [{"attention": {"n_heads_in_group": None, "replace_with_linear": True}}]
            + [{"attention": {"n_heads_in_group": 16}}],
        ),
        (3 * 512 + 256, 0, None),
    ),
    "openelm, heads a layer": (
        model(
            model_type="openelm",
            num_hidden_layers="absent",
            num_transformer_layers=3,
            num_attention_heads="absent",
            num_key_value_heads="absent",
            num_query_heads=[12, 12, 16],
            num_kv_heads=[3, 3, 4],
            head_dim=64,
        ),
        (10 * 256, 0, None),
    ),
    "hunyuan, one layer in two keeps": (
        model(model_type="hunyuan", use_cla=True, cla_share_factor=2),
        (4096, 0, None),
    ),
    "gpt neo, local and global": (
        {
            "model_type": "gpt_neo",
            "num_layers": 4,
            "num_heads": 8,
            "hidden_size": 512,
            "window_size": 256,
            "attention_types": [[["global", "local"], 2]],
        },
        (2 * 2048, 2 * 2048, 256),
    ),
    "mllama, layers that look at images": (
        {"model_type": "mllama", "text_config": model(cross_attention_layers=[3, 7])},
        (6 * 1024, 0, None),
    ),
    "a window a layer": (
        model(model_type="unheard-of", sliding_window=[None, 64, 64, 0, None, 64, 64, None]),
        (4096, 4096, 64),
    ),
    "longcat flash, two attentions a block": (
        {
            "model_type": "longcat_flash",
            "num_layers": 28,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        (56 * 1152, 0, None),
    ),
    "two KV dtypes agree on nothing: mpt": (
        {
            "model_type": "mpt",
            "d_model": 2048,
            "n_heads": 16,
            "n_layers": 4,
            "attn_config": {"kv_n_heads": 2},
        },
        (4 * 2 * 256 * 2, 0, None),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_per_token(name, rank):
    config, (full_bytes, window_bytes, window) = FAMILIES[name]
    built = rank(config)
    full, sliding = built.get("full"), built.get("swa") or built.get("chunked")
    assert (full.entry_bytes if full else 0) == full_bytes
    assert (sliding.entry_bytes if sliding else 0) == window_bytes
    assert (sliding.window if sliding else None) == window


def test_windows_of_several_lengths_are_sub_pools_of_their_own(rank):
    built = rank(model(sliding_window=[64, 64, 256, None, None, None, None, None]))
    assert [(pool.name, pool.window, pool.entry_bytes) for pool in built.sub_pools] == [
        ("swa-64", 64, 2048),
        ("swa-256", 256, 1024),
        ("full", None, 5120),
    ]


def test_the_indexer_of_sparse_attention_is_counted_beside_the_latent(rank):
    config = model(
        model_type="deepseek_v32",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_topk=2048,
        index_head_dim=128,
        index_n_heads=64,
    )
    built = rank(config, tp=8)
    assert {pool.name: pool.entry_bytes for pool in built.sub_pools} == {"indexer": 8 * 132, "full": 8 * 1152}
    # Every 4th layer from the second on searches; the others use its answer.
    shared = rank({**config, "index_topk_freq": 4, "index_skip_topk_offset": 2})
    assert shared.get("indexer").layers == (0, 1, 5)


def test_what_the_class_says_is_noted():
    notes = geometry_from_config(model(model_type="gpt_oss", head_dim=64, sliding_window="absent")).notes
    assert any("sliding_window is not in the file: 128, the default of gpt_oss" in note for note in notes)
    assert any("sliding_window_pattern is not in the file: 2" in note for note in notes)


def test_a_window_without_a_schedule_is_refused_where_no_class_says_more():
    with pytest.raises(ModelConfigError, match=r"^layer_types is missing: there is a window of 512 tokens"):
        geometry_from_config(model(model_type="unheard-of", sliding_window=512))


@pytest.mark.parametrize("name", ["mistral", "phi3", "starcoder2"])
def test_every_layer_slides_where_the_class_has_no_schedule(name):
    found = geometry_from_config(model(model_type=name, sliding_window=512))
    assert found.layer_counts()["sliding"] == 8
    assert any("Every layer slides over 512 tokens" in note for note in found.notes)


def test_an_unknown_model_with_plain_keys_is_read_by_them(rank):
    assert rank(model(model_type="never-heard-of")).get("full").entry_bytes == 8192
    assert rank(model(model_type="absent")).get("full").entry_bytes == 8192
