"""Estimated parameters of shapes that the published configurations here do not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.commands.plan.load import stored_weight_bytes
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


def test_every_layer_s_own_embeddings_count(config):
    text = config("gemma-4-e2b")["text_config"]
    narrow = {**text, "hidden_size_per_layer_input": None}
    file = config("gemma-4-e2b", text_config=narrow)
    added = parameters(config("gemma-4-e2b")) - parameters(file)
    # 35 layers of 256, for 262144 tokens, projected from 1536, with a gate and a projection in each layer.
    assert added == 35 * (256 * (262_144 + 1536) + 2 * 1536 * 256)


def test_layers_without_kv_of_their_own_are_twice_as_wide_in_gemma_4(config):
    text = config("gemma-4-e2b")["text_config"]
    plain = config("gemma-4-e2b", text_config={**text, "use_double_wide_mlp": False})
    assert parameters(config("gemma-4-e2b")) - parameters(plain) == 20 * 3 * 1536 * 6144


def test_an_image_tower_counts_unless_it_is_not_loaded(config):
    read = read_model(config("gemma-3-27b"))
    with_tower, without = estimate_weights(read), estimate_weights(read, towers=False)
    assert with_tower is not None
    assert without is not None
    tower = config("gemma-3-27b")["vision_config"]
    hidden, width = tower["hidden_size"], tower["intermediate_size"]
    per_layer = 4 * hidden * hidden + 2 * hidden * width
    assert with_tower.parameters - without.parameters == tower["num_hidden_layers"] * per_layer
    assert with_tower.parameters / 1e9 == pytest.approx(27.4, abs=0.1)


def test_the_weights_do_not_depend_on_who_counts_the_cache(config_file, cli):
    def weights(engine):
        arguments = ("--gpu-memory", "h200", "--engine", engine, "--json")
        return cli(config_file("gemma-3n-e4b"), *arguments).data["stages"][0]["weights_bytes"]

    assert weights("none") == weights("sglang")
    assert weights("none") > 12e9  # 6.4 billion parameters, those of the 15 sharing layers among them


@pytest.mark.parametrize(
    ("layers", "bits"),
    [
        (None, 6.25),
        ({"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "NVFP4"}, "c": {"quant_algo": "FP8"}}, 17 / 3),
    ],
)
def test_mixed_precision_is_not_sixteen_bits(layers, bits, config):
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    plain = estimate_weights(read_model(config("qwen3-32b")))
    mixed = estimate_weights(read_model(config("qwen3-32b", quantization_config=quantization)))
    assert plain is not None
    assert mixed is not None
    assert sum(mixed.layers) == pytest.approx(sum(plain.layers) * bits / 16, rel=1e-6)
    assert mixed.low < mixed.total * 0.9 < mixed.total * 1.5 < mixed.high


def test_an_unknown_quantization_has_a_wide_range(config):
    known = estimate_weights(read_model(config("qwen3-32b")))
    unknown = estimate_weights(read_model(config("qwen3-32b", quantization_config={"quant_method": "new"})))
    assert known is not None
    assert unknown is not None
    assert known.low > 0.96 * known.total
    assert unknown.low < 0.35 * unknown.total


def test_an_estimate_gives_its_range(config_file, cli):
    shown = cli(config_file("qwen3-32b"), "--gpu-memory", "h200").out
    assert (
        "Weights are estimated: 32.76 billion parameters, 16 bits, 61.02 GiB altogether, 59.19 GiB to"
        in shown
    )


def safetensors(file: Path, nbytes: int, *, written: int | None = None) -> None:
    header = json.dumps(
        {"__metadata__": {}, "w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
    )
    data = bytes(nbytes if written is None else written)
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


def test_the_headers_of_safetensors_are_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert stored_weight_bytes(tmp_path) is None
    safetensors(tmp_path / "a.safetensors", 1000)
    safetensors(tmp_path / "b.safetensors", 500, written=10)  # cut short: the header knows better
    assert stored_weight_bytes(tmp_path / "config.json") == (1500, "the headers of its safetensors")


def test_a_second_copy_of_the_weights_is_not_counted(tmp_path):
    safetensors(tmp_path / "consolidated.safetensors", 1500)
    safetensors(tmp_path / "one.safetensors", 1000)
    safetensors(tmp_path / "two.safetensors", 500)
    index = {"metadata": {"total_size": 7}, "weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_weight_bytes(tmp_path) == (1500, "the headers of its safetensors")
    (tmp_path / "two.safetensors").unlink()
    assert stored_weight_bytes(tmp_path) == (7, "the index of its safetensors")


@pytest.mark.parametrize(
    "raw", [b"", b"abc", b"\xff" * 8, (20).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]"]
)
def test_a_file_that_is_not_safetensors_never_fails_a_plan(raw, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(raw)
    found = stored_weight_bytes(tmp_path)
    assert found is None or found[0] in (len(raw), 0)
