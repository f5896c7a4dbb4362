"""Whatever the file holds: a number that can be, or a message that names the key."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvarena.errors import KvArenaError
from kvarena.plugin.commands.plan import (
    class_defaults,
    indexers,
    kinds,
    layer_sources,
    mlp,
    refused,
    rows,
    states,
    windows,
)
from kvarena.plugin.commands.plan.capacity_plan import PlanRequest, choose_dtypes, make_plan
from kvarena.plugin.commands.plan.errors import ModelConfigError, PlanError
from kvarena.plugin.commands.plan.load import load_config, parse_config, stored_weight_bytes
from kvarena.plugin.commands.plan.output import plan_data
from kvarena.plugin.commands.plan.read import geometry_from_config, read_model
from kvarena.plugin.commands.plan.weights import estimate_weights

PLAIN = {"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ('{"num_hidden_layers": 4', "is not JSON"),
        ("[1, 2]", "holds no object but a list"),
        ("null", "holds no object but a NoneType"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "number that cannot be read"),
        (b"\xff\xfe{}", "is not UTF-8"),
    ],
    ids=range(8),
)
def test_a_broken_file(text, says, tmp_path, cli):
    file = tmp_path / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    outcome = cli(tmp_path)
    assert (outcome.status, outcome.out) == (2, "")
    assert says in outcome.err
    assert "Traceback" not in outcome.err


def test_a_folder_without_a_file_and_a_path_without_anything(tmp_path, cli):
    assert "has no config.json" in cli(tmp_path).err
    missing = cli(tmp_path / "meta-llama" / "Llama-3.1-8B")
    assert missing.status == 2
    assert "does not exist" in missing.err
    assert "nothing is downloaded" in missing.err
    assert "cannot be read" in cli("\0").err


def test_a_byte_order_mark_and_a_bare_infinity_are_read():
    raw = b'\xef\xbb\xbf{"num_hidden_layers": 2, "time_step_limit": [0.0, Infinity]}'
    assert parse_config(raw, name="it")["time_step_limit"] == [0.0, math.inf]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers"),
        ({"num_hidden_layers": math.nan}, "num_hidden_layers"),
        ({"num_hidden_layers": math.inf}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_hidden_layers": [4]}, "num_hidden_layers"),
        ({"n_layer": 5}, "n_layer"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": {}}, "hidden_size"),
        ({"head_dim": 10**30}, "head_dim"),
        ({"head_dim": 10**5000}, "head_dim"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"num_key_value_heads": 32}, "num_key_value_heads"),
        ({"num_key_value_heads": [4, 4]}, "num_key_value_heads"),
        ({"num_key_value_heads": 4, "num_kv_heads": 8}, "num_kv_heads"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["retention"] * 4}, "layer_types"),
        ({"layer_types": [1, 2, 3, 4]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"layer_types": ["chunked_attention"] * 4}, "attention_chunk_size"),
        ({"sliding_window": 128, "sliding_window_size": 256}, "sliding_window_size"),
        ({"sliding_window": 10**20}, "sliding_window"),
        ({"sliding_window": [128] * 3}, "sliding_window"),
        ({"sliding_window": 128, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"sliding_window": 128, "sliding_window_pattern": "LLX"}, "sliding_window_pattern"),
        (
            {"sliding_window": 8, "sliding_window_pattern": 2, "layer_types": ["full_attention"] * 4},
            "sliding_window_pattern",
        ),
        ({"attention_chunk_size": 128}, "attention_chunk_size"),
        ({"use_sliding_window": "no"}, "use_sliding_window"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"kv_lora_rank": -1}, "kv_lora_rank"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 8}, "index_head_dim"),
        ({"v_head_dim": -128}, "v_head_dim"),
        ({"hybrid_override_pattern": "MEM?"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "MEM"}, "hybrid_override_pattern"),
        ({"attn_layer_period": 4, "attn_layer_offset": 4}, "attn_layer_offset"),
        ({"attn_layer_indices": [9]}, "attn_layer_indices"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"compress_ratios": [0, 4, 128]}, "compress_ratios"),
        ({"model_type": 7}, "model_type"),
        ({"model_type": "rwkv7"}, "model_type"),
        ({"text_config": []}, "text_config"),
        ({"multi_query_attention": True}, "multi_query_group_num"),
        ({"block_configs": [{}] * 4}, "block_configs"),
        (
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}},
            "linear_attn_config.kda_layers",
        ),
        ({"layer_types": ["mlp"] * 4}, "num_hidden_layers"),
    ],
)
def test_a_key_that_cannot_be_is_named(change, key):
    config = {**PLAIN, **change}
    with pytest.raises(ModelConfigError) as caught:
        geometry_from_config({name: value for name, value in config.items() if value is not None})
    assert caught.value.key == key
    assert key in str(caught.value)
    assert len(str(caught.value)) < 400


def test_nested_keys_are_named_with_their_path():
    with pytest.raises(ModelConfigError, match=r"^text_config\.head_dim is 0"):
        geometry_from_config({"text_config": {**PLAIN, "head_dim": 0}})


def test_two_language_models_are_not_guessed_between():
    with pytest.raises(ModelConfigError, match="both describe layers"):
        geometry_from_config({"draft": PLAIN, "target": PLAIN})
    # Another tower is no language model.
    assert len(geometry_from_config({"vision_tower": PLAIN, "decoder": PLAIN}).layers) == 4


def test_a_broken_index_of_weights_is_no_reason_to_fail(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", '{"metadata": 1}', '{"metadata": {"total_size": true}}'):
        index.write_text(text)
        assert stored_weight_bytes(tmp_path) is None
    index.write_text('{"metadata": {"total_size": 123456}}')
    assert stored_weight_bytes(tmp_path) == (123456, "the index of its safetensors")
    index.unlink()
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    assert stored_weight_bytes(tmp_path / "config.json") == (100, "the headers of its safetensors")


def _keys() -> list[str]:
    """Every key that the readers know: the words in quotes of their sources."""
    import inspect
    import re

    found: set[str] = set(PLAIN)
    readers = (class_defaults, indexers, kinds, layer_sources, mlp, refused, rows, states, windows)
    for module in readers:
        found |= set(re.findall(r'"([a-z_][a-zA-Z_0-9]+)"', inspect.getsource(module)))
    return sorted(found)


_WORDS = st.sampled_from(
    ["full_attention", "sliding_attention", "mamba", "conv", "hybrid", "auto", "MEM*", "LLLG", ""]
)
_NUMBERS = st.one_of(
    st.integers(-2, 12),
    st.sampled_from([64, 128, 4096, 2**31, 2**63, 10**40]),
    st.floats(),
    st.booleans(),
    st.none(),
)
_VALUES = st.recursive(
    st.one_of(_NUMBERS, _WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8), st.dictionaries(st.sampled_from(_keys()), inner, max_size=4)
    ),
    max_leaves=6,
)
_FAMILIES = (
    "llama gemma2 gemma3_text qwen2 llama4_text deepseek_v3 jamba zamba2 nemotron_h granitemoehybrid "
    "qwen3_next lfm2 mamba2 recurrent_gemma minimax exaone4 falcon ?"
)
_TYPES = st.sampled_from(_FAMILIES.split())


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(_keys()), _VALUES, max_size=6),
    model_type=_TYPES,
    base=st.booleans(),
    tp=st.sampled_from([1, 2, 3, 8]),
    pp=st.sampled_from([1, 2]),
)
def test_any_object_is_planned_or_refused(changes, model_type, base, tp, pp):
    config = {**(PLAIN if base else {}), "model_type": model_type, **changes}
    # As a file would hold it: a number is what JSON makes of it.
    config = parse_config(json.dumps(config).encode(), name="fuzzed")
    try:
        read = read_model(config)
        dtypes, _ = choose_dtypes(read.geometry, "auto", "auto", "auto")
        request = PlanRequest(tp=tp, pp=pp, dtypes=dtypes, pool_bytes=1 << 34)
        plan = make_plan(read.geometry, request, estimate=estimate_weights(read))
    except KvArenaError:
        return
    for rank in plan.ranks:
        for pool in rank.sub_pools:
            assert pool.entry_bytes > 0
            assert pool.window is None or pool.window > 0
    text = json.dumps(plan_data(plan), allow_nan=False)
    sizing = json.loads(text)["sizings"]["pool"]
    for name in ("tokens", "window_tokens", "states", "requests"):
        assert sizing[name] is None or 0 <= sizing[name] <= 1 << 34


def test_a_file_that_is_cut_short_anywhere(config_file):
    whole = config_file("kimi-k2.5").read_bytes().rstrip()
    for length in range(len(whole)):
        with pytest.raises(PlanError):
            parse_config(whole[:length], name="cut")
    assert parse_config(whole, name="whole")["model_type"] == "kimi_k25"


@pytest.mark.parametrize(
    "name", ["gemma-2-9b", "llama-4-scout", "deepseek-v3", "nemotron-h-56b", "dbrx-fixture"]
)
def test_any_one_key_may_be_anything(name, config):
    whole = config(name)
    block = whole.get("text_config", whole)
    for key in list(block):
        for value in (None, -1, 0, 1, 10**9, 0.5, math.nan, True, "", "1", [], [1], {}, {"a": 1}):
            changed = {**block, key: value}
            changed = {**whole, "text_config": changed} if "text_config" in whole else changed
            try:
                read = read_model(changed)
                estimate_weights(read)
                plan = make_plan(read.geometry, PlanRequest(pool_bytes=1 << 36))
            except KvArenaError:
                continue
            assert all(pool.entry_bytes > 0 for rank in plan.ranks for pool in rank.sub_pools)


def test_load_config_reads_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == PLAIN


ESCAPE = "\x1b[2J\x07"


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": ESCAPE + "x" * 300},
        {"torch_dtype": ESCAPE * 100},
        {"quantization_config": {"quant_method": ESCAPE * 100}},
        {ESCAPE * 100: ["a", "b"] * 4},
        {"layer_types": [ESCAPE] * 8},
        {"mamba_ssm_dtype": ESCAPE},
        {"hidden_act": ESCAPE, "sliding_window_pattern": ESCAPE, "sliding_window": 8},
        {"head_dim": 0, "nested": True},
        {"other": PLAIN, "nested": True},
    ],
    ids=range(9),
)
def test_a_file_does_not_speak_to_the_terminal(change, cli):
    # A file is downloaded; a terminal obeys what it prints.
    sizes = {"num_hidden_layers": 8, "intermediate_size": 64, "vocab_size": 64, "num_key_value_heads": 16}
    config = {**PLAIN, **sizes, **change}
    if config.pop("nested", False):
        inner = {key: value for key, value in config.items() if key != "other"}
        config = {ESCAPE * 50: inner, **({"other": PLAIN} if "other" in config else {})}
    outcome = cli(config, "--gpu-memory", "h200")
    assert outcome.out or outcome.err
    for text in (outcome.out, outcome.err):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert max(map(len, text.splitlines()), default=0) < 1000
