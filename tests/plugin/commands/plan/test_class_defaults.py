"""What a class assumes where a file is silent: taken, and said; never where the file speaks."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.read import geometry_from_config, read_model
from kvarena.plugin.commands.plan.weights import estimate_weights

TOWER = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}

# A wrapper's language model as its published file holds it, and what every layer of how many keeps.
NESTED: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "llava 1.5 7b": (
        {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        (32, 2 * 32 * 128 * 2),
    ),
    "llava 1.6 mistral": (
        {"model_type": "mistral", "intermediate_size": 14336, "sliding_window": None, "vocab_size": 32064},
        (32, 2 * 8 * 128 * 2),
    ),
    "idefics 3": (
        {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128259},
        (32, 2 * 8 * 128 * 2),
    ),
    "qwen 2 audio": (
        {"model_type": "qwen2", "intermediate_size": 11008, "sliding_window": 32768, "vocab_size": 156032},
        (32, 2 * 32 * 128 * 2),
    ),
    "pixtral": (
        {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40}
        | {"sliding_window": None},
        (40, 2 * 8 * 128 * 2),
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_nested_model_is_its_class_s_but_for_what_it_says(name, rank):
    text, (layers, row) = NESTED[name]
    config = {"model_type": "wrapper", "text_config": text, "vision_config": TOWER}
    assert rank(config).get("full").layer_bytes == (row,) * layers
    read = read_model(config)
    assert estimate_weights(read).parameters > 6e9
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        said = any(f"text_config.{key} is not in the file" in note for note in read.fields.notes.lines)
        assert said is (key not in text)


def test_a_whole_model_without_its_layers_is_broken():
    with pytest.raises(ModelConfigError, match="num_hidden_layers is missing"):
        geometry_from_config({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32})


def test_a_nested_list_of_layers_counts_them_before_the_class_does():
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    model = geometry_from_config({"text_config": {"model_type": "qwen3_5_text", "layer_types": kinds}})
    assert len(model.layers) == 8


# Model type, changes to 16 heads of 64 in 8 layers, (full B a layer, full layers, window layers, window)
CLASSES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int | None]]] = {
    "starcoder2": ({}, (512, 8, 0, None)),
    "ernie4_5": ({}, (2 * 2 * 128 * 2, 8, 0, None)),
    "ernie4_5_vl_moe_text": ({}, (1024, 8, 0, None)),
    "glm4v_text": ({}, (512, 8, 0, None)),
    "gemma2": ({}, (2 * 4 * 256 * 2, 4, 4, 4096)),
    "qwen2_5_vl_text": ({}, (2048, 8, 0, None)),
    "qwen3_moe": ({}, (1024, 8, 0, None)),
    "mistral4": ({}, ((256 + 64) * 2, 8, 0, None)),
    # Layers 0 and 4 are full.
    "cwm": ({}, (2048, 2, 6, 8192)),
    "jetmoe": ({}, (2 * 16 * 128 * 2, 8, 0, None)),
    "mllama_text_model": ({"num_hidden_layers": 40}, (2048, 32, 0, None)),
}


@pytest.mark.parametrize("name", CLASSES)
def test_key_value_heads_and_windows_of_a_class(name, rank):
    changes, (row, full, sliding, window) = CLASSES[name]
    config = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 8, "model_type": name}
    built = rank({**config, **changes})
    assert built.get("full").layer_bytes == (row,) * full
    swa = built.get("swa")
    assert (len(swa.layers) if swa else 0, swa.window if swa else None) == (sliding, window)


def test_minimax_without_a_list_of_layers_is_refused():
    config = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 8, "model_type": "minimax"}
    with pytest.raises(ModelConfigError, match="layer_types is missing: some layers are lightning"):
        geometry_from_config(config)
