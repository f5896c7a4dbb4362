"""Estimated parameters of shapes that the published configurations here do not have."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.plugin.commands.plan.read import read_model
from kvarena.plugin.commands.plan.weights import estimate_weights

SUPER: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
    "intermediate_size": 2688,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "n_routed_experts": 512,
    "tie_word_embeddings": False,
}
PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
WORDS = {"M": "mamba", "E": "moe", "*": "attention"}


def parameters(config: dict[str, Any]) -> int:
    estimate = estimate_weights(read_model(config))
    assert estimate is not None
    return estimate.parameters


def test_experts_in_a_latent_are_as_narrow_as_it():
    # Nemotron 3 Super has 120 billion parameters; with experts as wide as the model it would have 459.
    config = {**SUPER, "hybrid_override_pattern": PATTERN, "moe_latent_size": 1024}
    assert parameters(config) / 1e9 == pytest.approx(120.6, rel=0.02)


@pytest.mark.parametrize("latent", [1024, None])
def test_layers_by_words_hold_what_layers_by_letters_do(latent):
    letters = {**SUPER, "hybrid_override_pattern": PATTERN, "moe_latent_size": latent}
    words = {**SUPER, "layers_block_type": [WORDS[c] for c in PATTERN], "moe_latent_size": latent}
    assert parameters(words) == parameters(letters)


def test_a_word_for_the_mixer_alone_does_not_take_the_feed_forward_away():
    # Zamba and Jamba name the mixer only; the layer has both.
    config = {**SUPER, "model_type": "jamba-like", "n_routed_experts": 0, "num_hidden_layers": 4}
    named = {**config, "layers_block_type": ["attention", "mamba", "attention", "mamba"]}
    layers = 4 * 2 * 4096 * 2688
    without = {**named, "intermediate_size": 1}
    assert parameters(named) - parameters(without) == layers - 4 * 2 * 4096


def test_the_first_qwen_counts_both_halves_of_its_gate():
    qwen = {"model_type": "qwen", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes = {"kv_channels": 128, "intermediate_size": 22016, "vocab_size": 151936}
    assert parameters({**qwen, **sizes, "tie_word_embeddings": False}) / 1e9 == pytest.approx(7.72, rel=0.01)
