"""What sparse attention keeps to choose from, worked out by hand after SGLang 0.5.23's pools."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.read import geometry_from_config

LATENT: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
INDEXED = {**LATENT, "index_topk": 2048, "index_head_dim": 128}
#: Plain heads: 2 x 4 x 128 x 2 B. Sparse from layer 3 on; the last two layers' indexers keep a value, too.
M3: dict[str, Any] = {
    "model_type": "minimax_m3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 6,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_attention_freq": [0, 0, 0, 1, 1, 1],
        "sparse_disable_index_value": [0, 0, 0, 1, 0, 0],
    },
}


def sparse(**changes: Any) -> dict[str, Any]:
    block = {**M3["sparse_attention_config"], **changes}
    kept = {key: value for key, value in block.items() if value != "absent"}
    return {**M3, "sparse_attention_config": kept}


def pools(rank, config, **dtypes):
    return {pool.name: pool.layer_bytes for pool in rank(config, tp=2, **dtypes).sub_pools}


def test_index_keys_beside_plain_heads(rank):
    assert pools(rank, M3) == {"indexer": (256, 512, 512), "full": (1024,) * 6}
    # 16 bits whatever the cache is kept in.
    assert pools(rank, M3, kv="fp8_e4m3") == {"indexer": (256, 512, 512), "full": (512,) * 6}
    assert pools(rank, sparse(sparse_disable_index_value="absent"))["indexer"] == (512,) * 3
    # A list may go on with layers for multi-token prediction.
    assert pools(rank, sparse(sparse_attention_freq=[0, 0, 0, 1, 1, 1, 1]))["indexer"] == (256, 512, 512)
    assert "indexer" not in pools(rank, sparse(use_sparse_attention=False))
    assert "indexer" not in pools(rank, sparse(sparse_attention_freq=[0] * 6))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sparse_index_dim": "absent"}, "sparse_index_dim"),
        ({"sparse_index_dim": 0}, "sparse_index_dim"),
        ({"sparse_attention_freq": [0, 1]}, "sparse_attention_freq"),
        ({"sparse_attention_freq": ["yes"] * 6}, "sparse_attention_freq"),
        ({"sparse_disable_index_value": [1]}, "sparse_disable_index_value"),
        ({"use_sparse_attention": "no"}, "use_sparse_attention"),
    ],
)
def test_an_indexer_that_cannot_be_is_refused_by_key(changes, key):
    with pytest.raises(ModelConfigError) as caught:
        geometry_from_config(sparse(**changes))
    assert caught.value.key == f"sparse_attention_config.{key}"


def test_an_indexer_beside_heads_of_an_unknown_kind_is_refused():
    config = {**M3, "model_type": "unheard-of", "index_topk": 2048, "index_head_dim": 128}
    with pytest.raises(ModelConfigError, match="index_topk is there without kv_lora_rank"):
        geometry_from_config(config)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"indexer_types": ["full"] * 2 + ["shared"] * 3 + ["full"] + ["shared"] * 2}, (0, 1, 5)),
        ({"index_topk_pattern": "FSSSFSSS"}, (0, 4)),
        ({"index_topk_freq": 4}, (0, 1, 5)),
        ({}, tuple(range(8))),
    ],
)
def test_layers_that_use_another_s_answer_keep_no_index_key(changes, layers, rank):
    assert rank({**INDEXED, **changes}).get("indexer").layers == layers


def test_a_list_of_indexers_that_is_too_short_is_refused():
    with pytest.raises(ModelConfigError, match="indexer_types has 3 entries for 8 layers"):
        geometry_from_config({**INDEXED, "indexer_types": ["full"] * 3})


def test_tokens_that_share_a_key(rank):
    # 132 bytes over 4 tokens.
    assert rank({**INDEXED, "index_kpool": 4}).get("indexer").layer_bytes == (33,) * 8


def test_the_class_has_an_indexer_where_the_file_is_silent(rank):
    assert rank(LATENT).get("indexer").layer_bytes == (132,) * 8


def test_fp8_rows_of_sparse_attention_keep_scales(rank, cli):
    # 512 + 4 scales of 4 B + 64 x 2 B; without an indexer it is 576.
    assert pools(rank, INDEXED, kv="fp8_e4m3") == {"indexer": (132,) * 8, "full": (656,) * 8}
    assert pools(rank, INDEXED, kv="fp8_e5m2")["full"] == (576,) * 8
    assert pools(rank, {**LATENT, "model_type": "deepseek_v3"}, kv="fp8_e4m3") == {"full": (576,) * 8}
    assert "keep scales" in cli(INDEXED, "--kv-cache-dtype", "fp8_e4m3").out
    assert "fp8_e4m3 on Blackwell" in cli(INDEXED).out


def test_a_latent_may_have_no_rope_part(rank):
    config = {**LATENT, "model_type": "unheard-of", "qk_rope_head_dim": 0}
    assert rank(config).get("full").layer_bytes == (1024,) * 8
