"""Faults that other calculators had, by the id under which they were collected."""

from __future__ import annotations

import pytest
from kvarena.plugin.commands.plan.errors import GeometryError, ModelConfigError
from kvarena.plugin.commands.plan.read import geometry_from_config

O1 = {
    "model_type": "llama",
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}


def test_o1_a_stated_head_dim_wins(rank, cli):
    assert rank({**O1, "head_dim": 256}).get("full").entry_bytes == 8192
    assert rank({**O1, "head_dim": None}).get("full").entry_bytes == 7168
    assert rank(O1).get("full").entry_bytes == 7168
    stage = cli({**O1, "head_dim": 256}, "--json").data["stages"][0]
    assert stage["sub_pools"][0]["bytes_per_token"] == 8192


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": -1}, "head_dim"),
        ({"head_dim": "256"}, "head_dim"),
        ({"head_dim": 256.0}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": -4}, "num_key_value_heads"),
        ({"hidden_size": 3585}, "head_dim"),
    ],
)
def test_o1_a_size_that_cannot_be_is_refused_by_key(change, key, cli):
    outcome = cli({**O1, **change})
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith(f"kvarena plan: {key} ")


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("deepseek-v3", 70272), ("kimi-k2.5", 70272), ("minicpm3-4b", 35712), ("deepseek-v2-lite", 31104)],
)
def test_o2_a_latent_counts_once_whatever_the_heads_and_ranks(name, nbytes, config, rank):
    for tp in (1, 8):
        assert rank(config(name), tp=tp).get("full").entry_bytes == nbytes
    assert rank(config(name, num_key_value_heads=1)).get("full").entry_bytes == nbytes


def test_o2_a_name_does_not_make_a_latent(config, rank):
    assert rank(config("deepseek-vl2-tiny")).get("full").entry_bytes == 61440
    assert not geometry_from_config(config("deepseek-vl2-tiny")).mla


@pytest.mark.parametrize(
    ("name", "per_token", "per_request"),
    [("nemotron-h-56b", 40960, 912605184), ("nemotron-3-nano-30b", 6144, 49082368)],
)
def test_o4_only_attention_costs_per_token_and_states_come_off_first(
    name, per_token, per_request, config_file, cli
):
    def tokens(requests):
        arguments = ("--pool-memory", "64GiB", "--max-running-requests", requests, "--json")
        data = cli(config_file(name), *arguments).data
        sizes = {pool["name"]: pool for pool in data["stages"][0]["sub_pools"]}
        assert sizes["full"]["bytes_per_token"] == per_token
        assert sizes["mamba"]["bytes_per_request"] == per_request
        return data["sizings"]["pool"]["tokens"]

    few, more = tokens(8), tokens(16)
    assert few - more == pytest.approx(8 * per_request / per_token, abs=1)


def test_o5_heads_are_split_and_then_replicated(config, rank, cli, config_file):
    assert [rank(config("qwen3-32b"), tp=tp).get("full").entry_bytes for tp in (1, 4, 16)] == [
        262144,
        65536,
        32768,
    ]
    assert len({rank(config("gemma-3-1b"), tp=tp).get("full").entry_bytes for tp in (1, 2, 4)}) == 1
    with pytest.raises(GeometryError, match=r"12.*size 8"):
        rank(config("dbrx-fixture"), tp=8)
    outcome = cli(config_file("dbrx-fixture"), "--tp", 8)
    assert outcome.status == 2
    assert "num_key_value_heads is 12" in outcome.err
    assert "size 8" in outcome.err


@pytest.mark.parametrize("value", [-1, 0])
def test_o6_a_window_that_is_not_positive_is_none_and_said(value, config, rank):
    built = rank(config("gemma-2-9b", sliding_window=value))
    assert [(pool.name, pool.entry_bytes) for pool in built.sub_pools] == [("full", 42 * 8192)]
    notes = geometry_from_config(config("gemma-2-9b", sliding_window=value)).notes
    assert any(f"sliding_window is {value}: taken as no window" in note for note in notes)


def test_o6_a_window_as_text_is_refused_and_none_or_absent_is_an_answer(config, rank):
    with pytest.raises(ModelConfigError, match="sliding_window is '4096', not a whole number"):
        rank(config("gemma-2-9b", sliding_window="4096"))
    assert [pool.name for pool in rank(config("gemma-2-9b", sliding_window=None)).sub_pools] == ["full"]
    absent = config("gemma-2-9b")
    del absent["sliding_window"], absent["sliding_window_size"]
    assert [(pool.name, pool.window) for pool in rank(absent).sub_pools] == [("swa", 4096), ("full", None)]
    notes = geometry_from_config(absent).notes
    assert any("sliding_window is not in the file: 4096, the default of gemma2" in note for note in notes)


@pytest.mark.parametrize("value", [131072, -1, 0, None, 4096])
def test_o6_a_switched_off_window_is_never_read(value, config, rank):
    built = rank(config("qwen2.5-7b", sliding_window=value))
    assert [(pool.name, len(pool.layers)) for pool in built.sub_pools] == [("full", 28)]


def test_o6_a_model_without_a_full_layer_has_a_capacity(config_file, cli):
    sizing = cli(config_file("mistral-7b-v0.1"), "--pool-memory", "8GiB", "--engine", "none", "--json").data[
        "sizings"
    ]["pool"]
    # The sink is one page of 131072 B.
    assert sizing["tokens"] == (8 << 30) // 131072 - 1
    assert sizing["requests"] == (65536 - 1) // 4097


def test_o15_tokens_are_of_attention_alone_and_states_are_requests(config_file, cli):
    arguments = ("--pool-memory", "8GiB", "--max-running-requests", 16, "--json")
    sizing = cli(config_file("granite-4.0-h-tiny"), *arguments).data["sizings"]["pool"]
    state = 57341952
    # The sink is one state: the largest envelope.
    assert sizing["tokens"] == ((8 << 30) - 16 * state - state) // 8192
    assert sizing["states"] == 16
    assert sizing["requests"] == 16


@pytest.mark.parametrize(("name", "card"), [("phi-3-mini-128k", "h100"), ("phi-4-mini", "l4")])
def test_q24_a_window_as_long_as_the_context_counts_as_full(name, card, config, cli, config_file):
    found = geometry_from_config(config(name))
    assert found.layer_counts() == {"full": 32, "sliding": 0, "chunked": 0, "linear": 0, "none": 0}
    assert any("never drops any" in note for note in found.notes)
    for engine in ("none", "sglang"):
        outcome = cli(config_file(name), "--gpu-memory", card, "--engine", engine, "--json")
        assert outcome.status == 0
        assert outcome.data["sizings"]["before_capture"]["requests"] > 0


def test_q25_heads_are_derived_where_the_first_class_derived_them(config, rank):
    assert rank(config("zamba2-7b")).get("mamba").entry_bytes == 152_243_712


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "bamba-small",
            r"128 \(the class's default\): 128 heads of 64 \(mamba_d_head\) make 8192 .* is 4096",
        ),
        ("granite-h-short", r"128 \(the class's default\): 128 heads of 64 .* make 8192 .* is 3072"),
        ("bamba-contra", r"64: 64 heads of 64 \(mamba_d_head\) make 4096 channels, but .* is 8192"),
    ],
)
def test_q25_a_state_whose_sizes_contradict_each_other_is_refused_by_both_keys(name, said, config):
    with pytest.raises(ModelConfigError, match=f"^mamba_n_heads is {said}"):
        geometry_from_config(config(name))


@pytest.mark.parametrize(
    ("name", "full", "window"), [("granite-swash-2b-short", 6, 18), ("muse-glimmer-30b-short", 13, 39)]
)
def test_q26_a_schedule_that_is_left_out_is_the_class_s(name, full, window, config):
    counts = geometry_from_config(config(name)).layer_counts()
    assert (counts["full"], counts["sliding"]) == (full, window)


def test_q27_kimi_linear_in_the_form_of_transformers(config, rank):
    found = rank(config("kimi-linear-48b-transformers"))
    assert (len(found.get("full").layers), found.get("full").entry_bytes) == (7, 8064)
    assert (len(found.get("mamba").layers), found.get("mamba").entry_bytes) == (20, 43_417_600)


def test_q27_keys_and_values_of_one_tensor_are_counted_once(config, rank):
    assert rank(config("lumma-0.6b")).get("full").entry_bytes == 43_200
    both = rank(config("lumma-0.6b", shared_kv=False, kv_cache_mode="full"))
    assert both.get("full").entry_bytes == 86_400
