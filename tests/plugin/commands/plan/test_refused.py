"""What keeps no KV cache, or another than rows and states, is refused by the key that says so."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.read import geometry_from_config

PLAIN: dict[str, Any] = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        # BERT and the embedding models built on it, whatever they are called.
        ({"model_type": "bert", "type_vocab_size": 2}, "type_vocab_size"),
        ({"model_type": "xlm-roberta", "type_vocab_size": 1, "is_decoder": False}, "type_vocab_size"),
        ({"model_type": "unheard-of", "architectures": ["UnheardOfForMaskedLM"]}, "architectures"),
        ({"model_type": "modernbert", "global_attn_every_n_layers": 3}, "model_type"),
        ({"model_type": "siglip_text_model"}, "model_type"),
        ({"model_type": "voxtral_encoder"}, "model_type"),
        ({"model_type": "vit", "patch_size": 16, "image_size": 224}, "patch_size"),
        # T5 and its like, also where the flag was left out.
        ({"model_type": "t5", "num_decoder_layers": 12}, "num_decoder_layers"),
        ({"model_type": "bart-like", "encoder_layers": 12, "decoder_layers": 12}, "decoder_layers"),
        # Layers that share what they keep.
        ({"model_type": "llama_swiftkv", "key_value_group_size": 2}, "key_value_group_size"),
        ({"model_type": "qwen3_swiftkv", "kv_sharing_map": {"8": 7}}, "kv_sharing_map"),
        # States that no layer list names.
        ({"model_type": "zaya", "zaya_layers": ["a", 16] * 6}, "zaya_layers"),
        ({"model_type": "zaya", "cca": True}, "cca"),
        ({"model_type": "gated_deltanet", "expand_v": 2, "use_short_conv": True}, "expand_v"),
        ({"model_type": "comba", "use_short_conv": True}, "use_short_conv"),
        ({"model_type": "", "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [9]}, "ssm_cfg"),
        ({"model_type": "baichuan_m1", "conv_window": 2}, "conv_window"),
        ({"model_type": "inkling_model", "use_sconv": True}, "use_sconv"),
        ({"model_type": "qwen4_exp_text", "ple_layer_ids": [1, 5]}, "ple_layer_ids"),
    ],
)
def test_what_is_no_decoder_of_rows_and_states_is_refused_by_key(change, key):
    with pytest.raises(ModelConfigError) as caught:
        geometry_from_config({**PLAIN, **change})
    assert caught.value.key == key


@pytest.mark.parametrize("block", ["decoder", "text_config"])
def test_a_wrapper_s_word_on_its_decoder_counts(block):
    # T5Gemma, and a vision encoder with a decoder: the block itself says nothing of cross-attention.
    config = {"is_encoder_decoder": True, block: {**PLAIN, "model_type": "t5_gemma_module"}}
    with pytest.raises(ModelConfigError, match=r"^is_encoder_decoder is true: cross-attention"):
        geometry_from_config(config)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "bert", "type_vocab_size": 2, "is_decoder": True},
        {"model_type": "modernbert-decoder"},
        {"model_type": "unheard-of", "type_vocab_size": 16, "architectures": ["UnheardOfForCausalLM"]},
        {"model_type": "phi", "type_vocab_size": 16, "architectures": ["PhiModel"]},
        {"model_type": "molmo", "patch_size": 14, "vocab_size": 152064},
        {"model_type": "llama_swiftkv", "num_key_value_layers": 6, "key_value_group_size": 1},
        {"model_type": "ernie4_5"},
        {"model_type": "inkling_model", "use_sconv": False},
        {"model_type": "llama", "use_short_conv": False, "ssm_cfg": {}},
        {"model_type": "llama", "architectures": "LlamaForCausalLM"},
    ],
)
def test_a_decoder_with_a_key_of_theirs_is_planned(change):
    assert geometry_from_config({**PLAIN, **change}).layer_counts()["full"] == 12
