"""A quantized model's file decides its KV cache's dtype, as it does in an engine."""

from __future__ import annotations

import json

import pytest

PLAIN = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "torch_dtype": "bfloat16",
}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}

# quantization_config, (dtype, bytes of a token): 4 layers of 2 x 4 x 64 elements.
QUANTIZED = {
    "modelopt's scheme": ({"quant_algo": "NVFP4", "kv_cache_scheme": {**STATIC}}, ("fp8_e4m3", 2048)),
    "modelopt's scheme, short": (
        {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        ("fp8_e4m3", 2048),
    ),
    "a scheme by name": ({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, ("fp8_e4m3", 2048)),
    "an algorithm": ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, ("fp8_e4m3", 2048)),
    "weights only": ({"quant_method": "fp8", "kv_cache_scheme": None}, ("bfloat16", 4096)),
    # Scales made while serving belong to no fp8 pool.
    "a dynamic scheme": ({"kv_cache_scheme": {**STATIC, "dynamic": True}}, ("bfloat16", 4096)),
    "4 bits": ({"kv_cache_scheme": {**STATIC, "num_bits": 4}}, ("bfloat16", 4096)),
    "integers": ({"kv_cache_scheme": {**STATIC, "type": "int"}}, ("bfloat16", 4096)),
    "no object": (["fp8"], ("bfloat16", 4096)),
    "nonsense": ({"kv_cache_scheme": [8], "kv_cache_quant_algo": 8}, ("bfloat16", 4096)),
}


def kept(data):
    return data["kv_cache_dtype"], data["stages"][0]["sub_pools"][0]["bytes_per_token"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_auto_follows_the_file(name, cli):
    quantization, expected = QUANTIZED[name]
    data = cli({**PLAIN, "quantization_config": quantization}, "--json").data
    assert kept(data) == expected
    said = any("scales for a KV cache in fp8_e4m3" in note for note in data["notes"])
    assert said is (expected[0] == "fp8_e4m3")


def test_an_unknown_scheme_is_noted(cli):
    config = {**PLAIN, "quantization_config": {"kv_cache_quant_algo": "NVFP4"}}
    assert "KV cache scheme that is not known here" in cli(config).out


def test_a_given_dtype_wins_and_nothing_is_said_of_the_file_s(cli):
    config = {**PLAIN, "quantization_config": QUANTIZED["an algorithm"][0]}
    data = cli(config, "--kv-cache-dtype", "bfloat16", "--json").data
    assert kept(data) == ("bfloat16", 4096)
    assert not any("scales for a KV cache" in note for note in data["notes"])


def test_a_wrapper_s_quantization_is_its_language_model_s(cli):
    inner = {key: value for key, value in PLAIN.items() if key != "torch_dtype"}
    config = {"text_config": inner, "quantization_config": QUANTIZED["an algorithm"][0]}
    assert kept(cli(config, "--json").data) == ("fp8_e4m3", 2048)


def test_compressed_tensors_older_spelling_is_read(cli):
    assert kept(cli({**PLAIN, "compression_config": {"kv_cache_scheme": STATIC}}, "--json").data) == (
        "fp8_e4m3",
        2048,
    )


def test_modelopt_s_own_file_is_read(tmp_path, cli):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}))
    for path in (tmp_path, tmp_path / "config.json"):
        assert kept(cli(path, "--json").data) == ("fp8_e4m3", 2048)
    # What the model's own file says comes first, and a broken one is no answer.
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "quantization_config": {"bits": 4}}))
    assert kept(cli(tmp_path, "--json").data) == ("bfloat16", 4096)
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    file.write_text("{")
    broken = cli(tmp_path)
    assert (broken.status, broken.out) == (2, "")
    assert "hf_quant_config.json is not JSON" in broken.err
