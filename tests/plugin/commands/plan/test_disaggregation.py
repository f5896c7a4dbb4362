"""For a PD pair: what a request moves, attention data parallelism, drafts, FP4 KV."""

from __future__ import annotations

import pytest
from kvarena.plugin.commands.plan.moved import moved_bytes
from kvarena.plugin.commands.plan.ranks import CacheDtypes, rank_geometry
from kvarena.plugin.commands.plan.read import geometry_from_config
from kvarena.plugin.commands.plan.specs import pool_specs


def test_a_request_moves_its_tokens_its_windows_and_its_state(rank, config):
    # gpt-oss: 24576 bytes a token in either kind, windows of 128.
    found = moved_bytes([rank(config("gpt-oss-20b"))], 8192, page_size=16, tp=1)
    assert found.per_card == (24_576 * (8192 + 128),)
    assert found.seconds is None
    short = moved_bytes([rank(config("gpt-oss-20b"))], 100, page_size=16, tp=1)
    assert short.total == 24_576 * 2 * 112  # whole pages
    states = moved_bytes([rank(config("granite-4.0-h-tiny"))], 1000, page_size=1, tp=1)
    assert states.total == 8192 * 1000 + 57_341_952


def test_the_fullest_card_says_how_long_it_takes(config_file, cli):
    arguments = ("--tp", 4, "--pp", 2, "--context-len", 32_768, "--transfer-bandwidth", "50GB")
    data = cli(config_file("llama-3.1-70b"), *arguments, "--json").data["moved"]
    assert data["bytes"] == 327_680 * 32_768
    assert data["bytes_per_card"] == [327_680 * 32_768 // 8] * 2
    assert data["seconds"] == pytest.approx(327_680 * 32_768 / 8 / 50e9)
    shown = cli(config_file("llama-3.1-70b"), *arguments).out
    assert "a request of 32,768 tokens moves 10.00 GiB, 1.25 GiB of them from one card: 0.0268 s at" in shown


def test_groups_of_attention_keep_more_heads_on_a_rank(config_file, cli):
    def pool(*arguments):
        data = cli(config_file("qwen3-32b"), "--tp", 8, *arguments, "--pool-memory", "8GiB", "--json").data
        return data["stages"][0]["sub_pools"][0], data

    alone, _ = pool()
    grouped, data = pool("--dp-attention", 4)
    assert (alone["kv_heads_per_rank"], grouped["kv_heads_per_rank"]) == (1, 4)
    assert grouped["bytes_per_token"] == 4 * alone["bytes_per_token"]
    assert any("tokens and requests are of one group" in note for note in data["notes"])

    def weights(*arguments):
        data = cli(config_file("qwen3-32b"), "--tp", 8, *arguments, "--gpu-memory", "h200", "--json").data
        return data["stages"][0]["weights_bytes"]

    # 64 layers of 5120 x (2 x 64 + 2 x 8) x 128 attention parameters, in 2 bytes, over 2 ranks instead of 8.
    attention = 64 * 5120 * (2 * 64 + 2 * 8) * 128 * 2
    assert weights("--dp-attention", 4) - weights() == pytest.approx(attention / 2 - attention / 8, rel=1e-6)
    refused = cli(config_file("qwen3-32b"), "--tp", 8, "--dp-attention", 3)
    assert refused.status == 2
    assert "--dp-attention 3 does not divide --tp 8" in refused.err


def test_a_draft_s_layers_keep_rows_beside_the_target_s(config_file, cli):
    def data(name, *arguments):
        return cli(config_file(name), "--draft-layers", 2, *arguments, "--json").data

    pool = data("llama-3.1-70b")["stages"][0]["sub_pools"][0]
    assert (pool["num_layers"], pool["bytes_per_token"]) == (82, 82 * 4096)
    latent = data("deepseek-v3", "--tp", 8)["stages"][0]["sub_pools"][0]
    assert latent["bytes_per_token"] == 63 * 1152
    verdict = data("gpt-oss-20b")["sized_after_capture"]
    assert verdict["by"] == "sglang"
    assert "a draft's pool" in verdict["kvarena_refuses"][0]
    assert (
        cli("--window-layers", 2, "--window", 8, "--kv-heads", 1, "--head-dim", 8, "--draft-layers", 1).status
        == 2
    )


def test_fp4_takes_half_a_byte_and_a_scale_for_each_sixteen(config_file, config, cli):
    data = cli(config_file("llama-3.1-70b"), "--kv-cache-dtype", "fp4_e2m1", "--json").data
    assert data["stages"][0]["sub_pools"][0]["bytes_per_token"] == 80 * (2048 // 2 + 2048 // 16)
    latent = cli(config_file("deepseek-v3"), "--kv-cache-dtype", "fp4_e2m1", "--json").data
    assert latent["stages"][0]["sub_pools"][0]["bytes_per_token"] == 61 * (576 // 2 + 576 // 16)
    refused = cli(config_file("gpt-oss-20b"), "--kv-cache-dtype", "fp4_e2m1", "--json").data
    assert refused["sized_after_capture"]["by"] is None
    model = geometry_from_config(config("llama-3.1-70b"))
    dtypes = CacheDtypes(kv="fp4_e2m1")
    from kvarena.plugin.commands.plan.errors import PlanError

    with pytest.raises(PlanError, match="no layout describes them"):
        pool_specs(model, rank_geometry(model, tp=1, dtypes=dtypes), dtypes)
