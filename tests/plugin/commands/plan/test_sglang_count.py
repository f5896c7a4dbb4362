"""What SGLang allocates, and who sizes it after capture."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvarena.plugin.commands.plan.geometry import ModelGeometry
from kvarena.plugin.commands.plan.read import read_model
from kvarena.plugin.commands.plan.sglang_gain import GAINS, gain_table, judge
from kvarena.plugin.commands.plan.sglang_layers import HYBRID_WINDOW
from kvarena.plugin.commands.plan.sglang_reserve import RELEASES, ServerShape

ROOT = Path(__file__).parents[4]
SERVER = ServerShape(143_771)

#: Full layers and window layers of 0.5.23, and bytes of a token in all of each kind.
COUNTS = {
    "gemma-2-9b": (42, 0, 344_064, 0),
    "gemma-3-1b": (26, 0, 26_624, 0),
    "gemma-3-27b": (62, 0, 507_904, 0),
    "gemma-3n-e4b": (35, 0, 71_680, 0),
    "gemma-4-e2b": (7, 28, 14_336, 28_672),
    "gpt-oss-20b": (12, 12, 24_576, 24_576),
    "granite-swash-2b-short": (6, 18, 12_288, 36_864),
    "llama-4-scout": (12, 36, 49_152, 147_456),
    "mistral-7b-v0.1": (32, 0, 131_072, 0),
    "muse-glimmer-30b-short": (13, 39, 13_312, 39_936),
    "phi-3-mini-128k": (32, 0, 393_216, 0),
    "phi-4-mini": (32, 0, 131_072, 0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_layers_are_counted_as_sglang_counts_them(name, config_file, cli):
    data = cli(config_file(name), "--json").data
    pools = {pool["kind"]: pool for pool in data["stages"][0]["sub_pools"]}
    window = pools.get("swa") or pools.get("chunked") or {"num_layers": 0, "bytes_per_token": 0}
    full = pools["full"]
    found = (full["num_layers"], window["num_layers"], full["bytes_per_token"], window["bytes_per_token"])
    assert found == COUNTS[name]
    assert (data["engine"], data["sglang"]) == ("sglang", "0.5.23")


@pytest.mark.parametrize(
    ("name", "by_architecture", "by_sglang"),
    [
        ("gemma-3-27b", {"full": 10, "swa": 52}, {"full": 62}),
        ("gemma-3n-e4b", {"full": 4, "swa": 16}, {"full": 35}),
    ],
)
def test_the_architecture_alone_is_named_as_such(name, by_architecture, by_sglang, config_file, cli):
    def layers(*arguments):
        pools = cli(config_file(name), *arguments, "--json").data["stages"][0]["sub_pools"]
        return {pool["kind"]: pool["num_layers"] for pool in pools}

    assert layers("--engine", "none") == by_architecture
    assert layers() == by_sglang
    assert "the architecture alone" in cli(config_file(name), "--engine", "none").out


def test_q23_requests_on_an_h200_are_what_sglang_holds(config_file, cli):
    def after(name, *arguments):
        outcome = cli(config_file(name), "--gpu-memory", "h200", *arguments, "--json")
        assert outcome.status == 0
        return outcome.data["sizings"]["after_capture"]

    # Of the weights that an older estimate had: the figures were told with them.
    assert after("gemma-3-27b", "--weights", "54015983616")["requests"] == 20
    assert after("gemma-3n-e4b", "--weights", "5520752640")["requests"] == 240
    assert after("gemma-4-e2b", "--weights", "3041918976")["requests"] == 441
    # Twice as many were told as fit, for every layer of it slides only in the architecture.
    told = cli(config_file("mistral-7b-v0.1"), "--gpu-memory", "h200", "--engine", "none", "--json").data
    assert told["sizings"]["after_capture"]["requests"] >= 2 * after("mistral-7b-v0.1")["requests"]


def test_q23_requests_do_not_exceed_the_tokens(config_file, cli):
    before = cli(config_file("gpt-oss-20b"), "--gpu-memory", "h200", "--json").data["sizings"][
        "before_capture"
    ]
    assert (before["tokens"], before["requests"]) == (2_737_418, 334)
    assert before["requests"] == before["tokens"] // 8192


def test_releases_differ_in_which_windows_they_know(config_file, cli):
    def layers(name, release):
        pools = cli(config_file(name), "--sglang", release, "--json").data["stages"][0]["sub_pools"]
        return {pool["kind"]: pool["num_layers"] for pool in pools}

    assert layers("granite-swash-2b-short", "0.5.17") == {"full": 24}
    assert layers("granite-swash-2b-short", "0.5.20") == {"full": 6, "swa": 18}
    assert set(HYBRID_WINDOW) == set(RELEASES)


def test_layers_without_attention_of_their_own_are_allocated(config):
    # Llama 3.2 Vision's image layers: SGLang counts num_hidden_layers.
    text = {"model_type": "mllama_text_model", "num_hidden_layers": 40, "hidden_size": 4096}
    file = {"architectures": ["MllamaForConditionalGeneration"], "text_config": text}
    assert read_model(file).geometry.layer_counts()["full"] == 32
    assert read_model(file, sglang="0.5.23").geometry.layer_counts()["full"] == 40


def test_a_file_can_opt_in(config):
    file = config("gemma-3-1b", is_hybrid_swa=True, hybrid_layer_pattern=None)
    assert read_model(file, sglang="0.5.23").geometry.layer_counts()["sliding"] == 22


def model(config, name: str) -> ModelGeometry:
    return read_model(config(name), sglang="0.5.23").geometry


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        ("gpt-oss-20b", "kvarena", ""),
        ("gemma-4-e2b", "kvarena", ""),
        ("llama-4-scout", "kvarena", ""),
        ("llama-3.1-70b", "sglang", "not full and window attention"),
        ("gemma-3-27b", "sglang", "not full and window attention"),
        ("qwen3-32b", "sglang", "not full and window attention"),
        ("deepseek-v3", None, "MLA latents"),
        ("qwen3-next-80b-a3b", None, "recurrent states"),
    ],
)
def test_a_gain_is_promised_only_where_kvarena_sizes_the_pool(name, by, said, config_file, cli):
    outcome = cli(config_file(name), "--gpu-memory", "b200", "--tp", "2", "--weights", "20GB", "--json")
    found = outcome.data["sized_after_capture"]
    assert found["by"] == by
    assert (outcome.data["gain"] is not None) is (by == "kvarena")
    assert ("after_capture" in outcome.data["sizings"]) is (by is not None)
    assert said in "; ".join(found["kvarena_refuses"])
    shown = cli(config_file(name), "--gpu-memory", "b200", "--tp", "2", "--weights", "20GB").out
    assert ("Gain: " in shown) is (by == "kvarena")
    assert ("There is no gain from kvarena" in shown) is (by != "kvarena")


@pytest.mark.parametrize(
    ("server", "release", "kv", "said"),
    [
        (SERVER, "0.5.16", "bfloat16", "use 0.5.20 or later"),
        (
            ServerShape(1, disaggregation_mode="decode"),
            "0.5.17",
            "bfloat16",
            "refuses prefill and decode servers",
        ),
        (ServerShape(1, pp=2), "0.5.23", "bfloat16", "no prefill steps with pipeline stages"),
        (
            ServerShape(1, prefill_graph=False),
            "0.5.23",
            "bfloat16",
            "no prefill steps with --disable-prefill",
        ),
        (ServerShape(1, decode_graph=False), "0.5.23", "bfloat16", "no decode steps"),
        (ServerShape(1, draft_tokens=4), "0.5.23", "bfloat16", "a draft's pool"),
        (SERVER, "0.5.23", "fp4_e2m1", "FP4 KV"),
    ],
)
def test_settings_that_kvarena_refuses_gain_nothing(server, release, kv, said, config):
    verdict = judge(model(config, "gpt-oss-20b"), server, release, hybrid_window=True, kv_dtype=kv)
    assert verdict.by != "kvarena"
    assert said in "; ".join(verdict.reasons)


def test_an_experiment_names_its_setting(config):
    verdict = judge(model(config, "gpt-oss-20b"), SERVER, "0.5.18", hybrid_window=True)
    assert verdict.by == "kvarena"
    assert "KVARENA_SGLANG_EXPERIMENTAL=1" in verdict.flags


def test_steps_of_the_other_role_need_no_graphs(config):
    for server in (
        ServerShape(1, disaggregation_mode="decode", prefill_graph=False, pp=2),
        ServerShape(1, disaggregation_mode="prefill", decode_graph=False),
    ):
        verdict = judge(model(config, "gpt-oss-20b"), server, "0.5.23", hybrid_window=True)
        assert verdict.by == "kvarena"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/plan.md"])
def test_the_table_of_the_page_is_the_command_s(page):
    assert gain_table() in (ROOT / page).read_text()


def test_the_table_stands_at_the_top_of_the_output(config_file, cli):
    shown = cli(config_file("gpt-oss-20b")).out
    assert shown.startswith("What kvarena gains in SGLang today")
    assert shown.index("kvarena sizes it after capture") < shown.index("Sub-pools on one rank")
    flat = " ".join(shown.split())
    assert all(row[2] in flat for row in GAINS)
