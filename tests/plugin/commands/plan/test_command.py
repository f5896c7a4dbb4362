"""``kvarena plan`` as a user runs it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from kvarena.plugin.byte_sizes import GIB, MIB

PLAIN = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
HEADS = ("--kv-heads", 8, "--head-dim", 64)
#: The server that was measured: 6 full and 6 sliding layers, 0.81 GB of weights, small graphs.
MEASURED = (
    *("--full-layers", 6, "--window-layers", 6, "--window", 128, "--kv-heads", 8, "--head-dim", 64),
    *("--gpu-memory", "h200", "--weights", "0.81GB", "--page-size", 16),
    *("--chunked-prefill-size", 2048, "--cuda-graph-max-bs", 32, "--max-running-requests", 32),
)


def test_importing_the_command_costs_no_torch():
    code = (
        "import sys; from kvarena.plugin.commands.plan import command, read, capacity_plan;"
        "print([name for name in ('torch', 'numpy', 'rich', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plan_reproduces_servers_that_were_measured(cli):
    # SGLang 0.5.17: 128.45 GiB of KV with the pool sized before capture.
    before = cli(*MEASURED, "--sglang", "0.5.17", "--json").data["sizings"]["before_capture"]
    assert before["mem_fraction_static"] == 0.929
    assert before["pool_bytes"][0] / GIB == pytest.approx(128.45, abs=0.05)
    # SGLang 0.5.23: 136.66 GiB reserved, 135.58 backed once graphs had taken theirs.
    reserved = cli(*MEASURED, "--graph-memory", "0", "--json").data["sizings"]["after_capture"]
    assert reserved["pool_bytes"][0] / GIB == pytest.approx(136.66, abs=0.05)
    backed = cli(*MEASURED, "--graph-memory", "1.08GiB", "--json").data["sizings"]["after_capture"]
    assert backed["pool_bytes"][0] / GIB == pytest.approx(135.58, abs=0.05)


def test_memory_adds_up_to_the_card(cli):
    arguments = ("--gpu-memory", "80GiB", "--weights", "10GiB", "--runtime-memory", "1GiB", "--json")
    given = ("--graph-memory", "2GiB", "--activation-memory", "1GiB", "--engine", "none")
    data = cli(PLAIN, *arguments, *given).data
    before, after = data["sizings"]["before_capture"], data["sizings"]["after_capture"]
    free = 79 * GIB
    assert before["pool_bytes"] == [int(free * before["mem_fraction_static"]) - 10 * GIB]
    assert after["pool_bytes"] == [int(free * after["mem_fraction_static"]) - 13 * GIB]
    assert before["tokens"] == before["pool_bytes"][0] // 4096 - 1
    assert data["gain"]["bytes"] == after["pool_bytes"][0] - before["pool_bytes"][0]
    assert data["gain"]["tokens"] == after["tokens"] - before["tokens"]
    kept = before["kept_back_bytes"]
    assert sum(kept.values()) == 13904 * MIB  # 512 + 12288 + 128 + 976


def test_more_graph_memory_is_less_gain_and_may_be_none(cli):
    def won(graphs):
        arguments = ("--gpu-memory", "h100", "--graph-memory", graphs, "--engine", "none", "--json")
        return cli(PLAIN, *arguments).data["gain"]["tokens"]

    gains = [won(graphs) for graphs in ("1GiB", "8GiB", "20GiB")]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0 > gains[-1]


def test_a_given_fraction_leaves_nothing_to_gain_and_says_so(cli):
    arguments = ("--gpu-memory", "h100", "--mem-fraction-static", "0.88", "--engine", "none", "--json")
    outcome = cli(PLAIN, *arguments)
    assert outcome.data["gain"]["bytes"] < 0
    shown = cli(*MEASURED, "--mem-fraction-static", "0.88").out
    assert "No gain: -" in shown
    assert "\nGain" not in shown
    assert any("mem_fraction_static" in note for note in outcome.data["notes"])


def test_pipeline_stages_are_planned_one_by_one(cli, config_file):
    arguments = ("--pool-memory", "4GiB", "--engine", "none", "--json")
    data = cli(config_file("gemma-2-9b"), "--pp", 4, *arguments).data
    assert [stage["layers"] for stage in data["stages"]] == [[0, 10], [10, 20], [20, 31], [31, 42]]
    counts = [{pool["name"]: pool["num_layers"] for pool in stage["sub_pools"]} for stage in data["stages"]]
    assert counts == [{"swa": 5, "full": 5}] * 2 + [{"swa": 6, "full": 5}, {"swa": 5, "full": 6}]
    cut = cli(config_file("gemma-2-9b"), "--pp", 2, "--pp-layers", "40,2", "--json").data
    assert [stage["layers"] for stage in cut["stages"]] == [[0, 40], [40, 42]]


def test_weights_are_shared_out_by_stage_and_rank(cli):
    arguments = ("--gpu-memory", "h100", "--tp", 2, "--pp", 2, "--json")
    first, last = (stage["weights_bytes"] for stage in cli(PLAIN, *arguments).data["stages"])
    layer = 1024 * (16 * 128 + 4 * 128) + 3 * 1024 * 4096
    assert first == last == (2 * layer + 32000 * 1024) * 2 // 2
    given = cli(PLAIN, *arguments, "--weights", "4GiB").data["stages"]
    assert [stage["weights_bytes"] for stage in given] == [GIB, GIB]


def test_weights_beside_the_file_come_first(cli, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    index = {"metadata": {"total_size": 3 * GIB}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    data = cli(tmp_path, "--gpu-memory", "h100", "--json").data
    assert data["stages"][0]["weights_bytes"] == 3 * GIB
    assert any("beside the configuration: 3.00 GiB" in note for note in data["notes"])


def test_dtypes_follow_the_file_and_the_option(cli):
    def kv(config, *arguments):
        data = cli(config, *arguments, "--json").data
        return data["kv_cache_dtype"], data["stages"][0]["sub_pools"][0]["bytes_per_token"]

    assert kv(PLAIN) == ("bfloat16", 4096)
    assert kv({**PLAIN, "torch_dtype": "float16"}) == ("float16", 4096)
    assert kv({**PLAIN, "torch_dtype": "float32"}) == ("bfloat16", 4096)
    assert kv(PLAIN, "--kv-cache-dtype", "fp8_e4m3") == ("fp8_e4m3", 2048)
    assert kv(PLAIN, "--kv-cache-dtype", "float32") == ("float32", 8192)


def test_a_geometry_by_options(cli):
    hybrid = ("--full-layers", 2, "--window-layers", 4, "--window", 128, "--kv-heads", 8, "--head-dim", 64)
    pools = cli(*hybrid, "--window-kv-heads", 4, "--tp", 2, "--json").data["stages"][0]["sub_pools"]
    assert [(pool["name"], pool["bytes_per_token"]) for pool in pools] == [("swa", 2048), ("full", 2048)]
    latent = ("--full-layers", 3, "--kv-lora-rank", 512, "--qk-rope-head-dim", 64)
    assert cli(*latent, "--tp", 8, "--json").data["stages"][0]["sub_pools"][0]["bytes_per_token"] == 3456
    states = ("--state-layers", 2, "--state-elements", 1000, "--pool-memory", "1MiB")
    data = cli(*states, "--json").data
    assert data["stages"][0]["sub_pools"][0]["bytes_per_request"] == 8000
    assert (data["sizings"]["pool"]["tokens"], data["sizings"]["pool"]["states"]) == (None, MIB // 8000 - 1)


def test_tables_say_it_all(cli, config_file):
    arguments = ("--gpu-memory", "h200", "--max-running-requests", 64, "--engine", "none")
    outcome = cli(config_file("granite-4.0-h-tiny"), *arguments)
    assert outcome.status == 0
    for text in (
        "40 layers: 4 full, 36 linear",
        "57,341,952 / request",
        "8,192 / token",
        "sized before capture",
        "sized after capture",
        "An engine that sizes after capture would gain: ",
        "Engine none: what the architecture alone needs",
        "requests with a state",
        "Recurrent states are counted in float32",
        "Weights are estimated: 6.94 billion parameters",
    ):
        assert text in outcome.out


def test_a_model_that_does_not_fit_is_status_1(cli, config_file):
    outcome = cli(config_file("qwen3-32b"), "--pool-memory", "100kB")
    assert outcome.status == 1
    assert "tokens" in outcome.out
    outcome = cli(config_file("llama-3.1-70b"), "--gpu-memory", "h100")
    assert outcome.status == 1
    assert "The weights take 131.41 GiB of a card with 78.32 GiB free" in outcome.out
    assert "327,680 / token" in outcome.out
    data = cli(config_file("llama-3.1-70b"), "--gpu-memory", "h100", "--json").data
    assert (data["fits"], data["sizings"]) == (False, {})
    assert data["problem"].startswith("The weights take 131.41 GiB")


def test_the_geometry_is_printed_even_where_the_weights_are_not_known(cli):
    arguments = ("--full-layers", 2, *HEADS, "--gpu-memory", "h100")
    outcome = cli(*arguments)
    assert outcome.status == 2
    assert "4,096 / token" in outcome.out
    assert "The size of the weights is not known" in outcome.err
    small = cli(PLAIN, "--gpu-memory", "2GiB")
    assert small.status == 2
    assert "4,096 / token" in small.out
    assert "would set aside" in small.err


def test_only_what_is_made_of_it_decides_whether_it_fits(cli, config_file):
    # Sized before capture nothing is left on an H200; sized after it, two requests fit.
    outcome = cli(config_file("llama-3.1-70b"), "--gpu-memory", "h200", "--json")
    sizings = outcome.data["sizings"]
    assert (sizings["before_capture"]["fits"], sizings["after_capture"]["fits"]) == (False, True)
    assert (outcome.status, outcome.data["fits"]) == (0, True)


def test_a_pool_below_the_floor_for_one_request_does_not_fit(cli, config_file):
    # Tokens without a window's would fit, but the pool that kvarena makes refuses this size.
    said = json.loads(cli(config_file("gpt-oss-20b"), "--pool-memory", "1GiB", "--json").out)
    floor = said["stages"][0]["floor_bytes"]
    for size, status in ((floor, 0), (floor - 1, 1)):
        outcome = cli(config_file("gpt-oss-20b"), "--pool-memory", str(size), "--json")
        assert (outcome.status, json.loads(outcome.out)["fits"]) == (status, status == 0)
        said = cli(config_file("gpt-oss-20b"), "--pool-memory", str(size)).out
        assert ("Does not fit: pool as given" in said) == (status == 1)


@pytest.mark.parametrize("option", ["--language-only", "--cuda-graph-max-bs=4", "--disable-decode-graph"])
def test_what_is_about_a_server_says_nothing_without_a_card(cli, config_file, option):
    outcome = cli(config_file("gpt-oss-20b"), option)
    assert outcome.status == 2
    assert f"{option.partition('=')[0]} says nothing without a card" in outcome.err


def test_a_picture(cli, config_file, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    assert cli(config_file("gpt-oss-20b"), "--gpu-memory", "h200", "--plot", file).status == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    missing = cli(config_file("gpt-oss-20b"), "--gpu-memory", "h200", "--plot", tmp_path / "no" / "plan.png")
    assert missing.status == 2
    assert "cannot be written" in missing.err
    assert "nothing to draw" in cli(config_file("gpt-oss-20b"), "--plot", file).err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "There is no model"),
        (("--kv-heads", 8), "There is no model"),
        (("--full-layers", 2, "--kv-heads", 8), "--head-dim is missing"),
        (("--window-layers", 2, "--kv-heads", 8, "--head-dim", 64), "--window is missing"),
        (("--state-layers", 2), "--state-elements is missing"),
        (("--full-layers", 2, "--kv-lora-rank", 8), "--qk-rope-head-dim is missing"),
        ((PLAIN, "--full-layers", 2), "both describe the model"),
        (("--full-layers", 2, *HEADS, "--window", 64), "--window says nothing here"),
        (("--full-layers", 2, *HEADS, "--window-head-dim", 64), "--window-head-dim says nothing here"),
        (("--full-layers", 2, *HEADS, "--state-elements", 64), "--state-elements says nothing here"),
        (("--full-layers", 2, *HEADS, "--qk-rope-head-dim", 64), "--qk-rope-head-dim says nothing here"),
        (("--full-layers", 2, *HEADS, "--kv-lora-rank", 8), "--kv-heads says nothing here"),
        ((PLAIN, "--weights", "1GB"), "--weights says nothing without a card"),
        ((PLAIN, "--pool-memory", "1GiB", "--graph-memory", "1GB"), "--graph-memory says nothing without"),
        # An unset variable in a script is no answer.
        (("",), "The path of the model is empty"),
        ((PLAIN, "--gpu-memory", ""), "'' is not a valid size"),
        ((PLAIN, "--pool-memory", ""), "'' is not a valid size"),
        ((PLAIN, "--gpu-memory", "h100", "--weights", ""), "'' is not a valid size"),
        ((PLAIN, "--tp", 0), "0 is not from 1"),
        ((PLAIN, "--tp", -2), "-2"),
        ((PLAIN, "--tp", "two"), "'two' is not a whole number"),
        ((PLAIN, "--tp", "9" * 5000), "is not"),
        ((PLAIN, "--tp", 3), "num_key_value_heads is 4"),
        ((PLAIN, "--pp", 5), "4 layers cannot be split into 5"),
        ((PLAIN, "--pp", 2, "--pp-layers", "1,2"), "does not split 4 layers"),
        ((PLAIN, "--pp", 2, "--pp-layers", "1,x"), "'x' is not a whole number"),
        ((PLAIN, "--page-size", 0), "0 is not from 1"),
        ((PLAIN, "--pool-memory", "0"), "is not positive"),
        ((PLAIN, "--pool-memory=-1GiB"), "is not a valid size"),
        ((PLAIN, "--pool-memory", "8 parsecs"), "is not a valid size"),
        ((PLAIN, "--pool-memory", "nan"), "is not a valid size"),
        ((PLAIN, "--pool-memory", "1" + "0" * 400), "more than 1152921504606846976 bytes"),
        ((PLAIN, "--gpu-memory", "h9000"), "is not a valid size"),
        ((PLAIN, "--gpu-memory", "10kB"), "at least 1 MiB"),
        ((PLAIN, "--gpu-memory", "h100", "--pool-memory", "1GiB"), "not allowed with"),
        ((PLAIN, "--gpu-memory", "h100", "--sglang", "0.4.0"), "Known are 0.5.16"),
        ((PLAIN, "--gpu-memory", "h100", "--mem-fraction-static", "nan"), "is not above 0"),
        ((PLAIN, "--gpu-memory", "h100", "--mem-fraction-static", "1.5"), "is not above 0 and up to 1"),
        ((PLAIN, "--swa-full-tokens-ratio", "0"), "is not above 0"),
        ((PLAIN, "--gpu-memory", "h100", "--weights", "lots"), "is not a valid size"),
    ],
)
def test_bad_options_are_status_2_with_a_reason(arguments, says, cli):
    outcome = cli(*arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert says in outcome.err
    assert "Traceback" not in outcome.err


def _documented() -> list[str]:
    lines = (Path(__file__).parents[4] / "docs" / "plan.md").read_text().splitlines()
    return [line for line in lines if line.startswith("kvarena plan ")]


@pytest.mark.parametrize("line", _documented())
def test_commands_of_the_page_run(line, cli, config_file, tmp_path, monkeypatch):
    if "--plot" in line:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_bytes(config_file("gpt-oss-20b").read_bytes())
    outcome = cli(*shlex.split(line)[2:])
    assert (outcome.status, outcome.err) == (0, "")
    assert "layers" in outcome.out


def test_the_figures_of_the_page_are_those_of_the_command(cli):
    page = (Path(__file__).parents[4] / "docs" / "plan.md").read_text()
    before = cli(*MEASURED, "--sglang", "0.5.17", "--json").data["sizings"]["before_capture"]
    reserved = cli(*MEASURED, "--graph-memory", "0", "--json").data["sizings"]["after_capture"]
    assert f"{before['pool_bytes'][0] / GIB:.2f} GiB planned" in page
    assert f"{reserved['pool_bytes'][0] / GIB:.2f} GiB reserved" in page
