"""Every refusal on every release; stock's answer for every pool that is not ours."""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
import pytest
import torch
from kvarena.hooks import hookimpl
from kvarena.plugin.engines.sglang import planner
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.families.targets import Support
from kvarena.plugin.engines.sglang.request import ENVIRONMENT
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.pool import Refusal

pytestmark = pytest.mark.sglang

MOONCAKE_PAIR = {"disaggregation_mode": "prefill"}  # the default backend
NIXL_PAIR = MOONCAKE_PAIR | {"disaggregation_transfer_backend": "nixl"}

#: What is changed, and the code of the reason that must be among the answers.
REFUSED = {
    "cpu": ({"device": "cpu"}, "no_driver"),
    "dcp": ({"dcp_size": 2}, "decode_context_parallel"),
    "cp": ({"attn_cp_size": 2}, "context_parallel"),
    "memory_saver": ({"enable_memory_saver": True}, "memory_saver"),
    "no_kv": ({"prefill_only_disable_kv_cache": True}, "no_kv_cache"),
    "decode_graphs": ({"graph__decode__backend": "disabled"}, "no_decode_graphs"),
    "prefill_graphs": ({"graph__prefill__backend": "disabled"}, "no_prefill_graphs"),
    "unbounded_chunk": ({"chunked_prefill_size": -1}, "prefill_not_covered"),
    "uncovered_chunk": ({"graph__prefill__bs": [16, 1024]}, "prefill_not_covered"),
    "no_prefill_sizes": ({"graph__prefill__bs": None}, "prefill_not_covered"),
    "not_hybrid": ({"model__is_hybrid_swa": False}, "not_hybrid"),
    "deepseek_v4": (
        {"model__architecture": "DeepseekV4ForCausalLM"},
        "unsupported_kind",
    ),
    "minimax": (
        {"model__architecture": "MiniMaxM3SparseForCausalLM"},
        "unsupported_kind",
    ),
    "ray": ({"use_ray": True}, "ray"),
    "sharding": ({"enable_kv_cache_sharding": True}, "kv_cache_sharding"),
    "hisparse": ({"enable_hisparse": True}, "hisparse"),
    "fp4": ({"kv_cache_dtype": "fp4_e2m1"}, "fp4"),
    "elastic_ep": ({"elastic_ep_backend": "mooncake"}, "elastic_ep"),
    "role_switch": (
        {
            "disaggregation_mode": "decode",
            "enable_pd_role_switch": True,
            "graph__prefill__backend": "disabled",
        },
        "role_switch",
    ),
    "eagle": ({"speculative_algorithm": "EAGLE"}, None),
    "standalone": ({"speculative_algorithm": "STANDALONE"}, None),
}


@pytest.fixture
def reasons(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask the real planner, and give back its answer with the codes of kvarena's reasons."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)

    def ask(arguments: Any) -> tuple[bool, list[str]]:
        original = getattr(resolve(sglang.planner_path), "__wrapped__", None)
        codes = [refusal.code for refusal in planner.refusals_of(original, arguments)]
        return bool(resolve(sglang.planner_path)(arguments)), codes

    return ask


def test_a_supported_configuration_is_planned_with_kvarena_enable_alone(
    sglang: Any, rig_module: Any, reasons: Any
) -> None:
    assert ENVIRONMENT not in os.environ
    assert reasons(rig_module.planner_arguments(sglang)) == (True, [])
    assert ENVIRONMENT not in os.environ
    assert runtime.planned is True


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_sides_of_disaggregation_are_planned(
    sglang: Any, rig_module: Any, reasons: Any, role: str
) -> None:
    idle = "prefill" if role == "decode" else "decode"
    changes = {"disaggregation_mode": role, f"graph__{idle}__backend": "disabled"}
    assert reasons(rig_module.planner_arguments(sglang, **changes)) == (True, [])


@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal(sglang: Any, rig_module: Any, reasons: Any, name: str) -> None:
    changes, code = REFUSED[name]
    planned, codes = reasons(rig_module.planner_arguments(sglang, **changes))
    assert planned is False
    assert codes
    if code is not None:
        assert code in codes
    assert runtime.planned is False


def test_all_reasons_come_at_once_and_each_is_logged_once(
    sglang: Any, rig_module: Any, reasons: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = rig_module.planner_arguments(
        sglang, enable_memory_saver=True, dcp_size=4, use_ray=True, model__is_hybrid_swa=False
    )
    runtime._said.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _, codes = reasons(arguments)
    assert {"memory_saver", "decode_context_parallel", "ray", "not_hybrid"} <= set(codes)
    lines = [
        record.getMessage() for record in caplog.records if "not sized after capture" in record.getMessage()
    ]
    assert len(lines) == len(set(lines)) == len(codes)
    assert any("--enable-memory-saver" in line for line in lines)
    assert any("--dcp-size" in line for line in lines)


def test_mla_and_mamba_models_are_refused(
    sglang: Any, rig_module: Any, reasons: Any, monkeypatch: Any
) -> None:
    mla = resolve("sglang.srt.configs.model_config.AttentionArch").MLA
    assert "unsupported_kind" in reasons(rig_module.planner_arguments(sglang, model__attention_arch=mla))[1]
    hybrid = resolve("sglang.srt.configs.hybrid_arch")
    monkeypatch.setattr(hybrid, "mambaish_config", lambda model: object())
    assert "unsupported_kind" in reasons(rig_module.planner_arguments(sglang))[1]


def test_a_prefill_server_may_become_a_decode_server(sglang: Any, rig_module: Any, reasons: Any) -> None:
    """SGLang asks how much memory its decode graphs take before it captures them."""
    changes = {"disaggregation_mode": "prefill", "enable_pd_role_switch": True}
    assert reasons(rig_module.planner_arguments(sglang, **changes)) == (True, [])


def test_amds_cuda_is_refused(sglang: Any, rig_module: Any, reasons: Any, monkeypatch: Any) -> None:
    """SGLang's planner looks at the device's name, its runner at the platform: the reserve would be gone."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert reasons(rig_module.planner_arguments(sglang)) == (False, ["no_driver"])


@pytest.mark.parametrize("protocol", ["efa", "EFA"])
def test_efa_is_refused(sglang: Any, rig_module: Any, reasons: Any, monkeypatch: Any, protocol: str) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", protocol)
    arguments = rig_module.planner_arguments(sglang, disaggregation_mode="decode")
    assert reasons(arguments) == (False, ["efa"])


def test_a_custom_mem_pool_is_refused(sglang: Any, rig_module: Any, reasons: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "NVLINK")
    assert reasons(rig_module.planner_arguments(sglang)) == (False, ["custom_mem_pool"])


def test_a_contradiction_of_settings_is_refused(
    sglang: Any, rig_module: Any, reasons: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "0")
    assert reasons(rig_module.planner_arguments(sglang)) == (False, ["contradiction"])


@pytest.mark.parametrize(
    ("setting", "changes", "line"),
    [
        ({"same_host": True}, {}, "KVARENA_SAME_HOST has no effect"),
        ({"same_host": True}, NIXL_PAIR, "KVARENA_SAME_HOST has no effect"),
        ({"same_host": True}, MOONCAKE_PAIR, ""),
        ({"transfer": ("nixl",)}, {}, "KVARENA_TRANSFER=nixl has no effect: SGLang transfers by nothing"),
        (
            {"transfer": ("nixl",)},
            MOONCAKE_PAIR,
            "KVARENA_TRANSFER=nixl has no effect: SGLang transfers by mooncake",
        ),
        ({"transfer": ("nixl",)}, NIXL_PAIR, ""),
    ],
    ids=["same-host alone", "same-host, nixl", "same-host, mooncake", "alone", "mooncake", "nixl"],
)
def test_a_setting_is_said_once_to_have_no_effect_where_it_has_none(
    sglang: Any,
    rig_module: Any,
    reasons: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: dict[str, Any],
    changes: dict[str, Any],
    line: str,
) -> None:
    monkeypatch.setattr(runtime, "settings", msgspec.structs.replace(runtime.settings, **setting))
    runtime._said.clear()
    for _ in range(2):
        assert reasons(rig_module.planner_arguments(sglang, **changes)) == (True, [])
    assert caplog.text.count("has no effect") == bool(line)
    assert line in caplog.text


def test_stock_knows_a_reason_that_we_do_not(
    sglang: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    refusals = planner.refusals_of(lambda arguments: False, rig_module.planner_arguments(sglang))
    assert [refusal.code for refusal in refusals] == ["stock"]


ARGUMENTS = (
    "dcp_size",
    "attn_cp_size",
    "use_ray",
    "enable_hisparse",
    "enable_memory_saver",
    "prefill_only_disable_kv_cache",
    "elastic_ep_backend",
)


def test_the_refusals_look_at_arguments_that_sglang_has(sglang: Any) -> None:
    """The other tests give the planner a stand-in, which has whatever it is given."""
    real = resolve("sglang.srt.server_args.ServerArgs")(model_path="dummy")
    assert [name for name in ARGUMENTS if not hasattr(real, name)] == []
    assert hasattr(real, "enable_kv_cache_sharding") is sglang.hardened
    assert hasattr(real, "enable_pd_role_switch") is (sglang.number >= 21)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_configuration_that_cannot_be_read_is_refused(
    sglang: Any, rig_module: Any, reasons: Any, name: str
) -> None:
    arguments = rig_module.planner_arguments(sglang)
    delattr(arguments, name)
    original = resolve(sglang.planner_path).__wrapped__
    assert [r.code for r in planner.refusals_of(original, arguments)] == ["unreadable"]


def test_third_parties_refuse(sglang: Any, rig_module: Any, reasons: Any, rig: Any) -> None:
    class Party:
        @hookimpl
        def kvarena_refusals(self, request: Any) -> list[Refusal]:
            assert request.hybrid
            return [Refusal("party", "--party", "not today")]

    class Broken:
        @hookimpl
        def kvarena_refusals(self, request: Any) -> list[Refusal]:
            raise ZeroDivisionError

    rig.plug(Party())
    assert reasons(rig_module.planner_arguments(sglang)) == (False, ["party"])
    rig.plug(Broken())
    assert reasons(rig_module.planner_arguments(sglang)) == (False, ["plugin"])


@pytest.mark.parametrize("switch", [None, "1"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_memory_saver": True},
        {"chunked_prefill_size": -1},
        {"use_ray": True},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_other_pools_get_stocks_answer(
    sglang: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch, switch: str | None, changes: dict[str, Any]
) -> None:
    if switch:
        monkeypatch.setenv(ENVIRONMENT, switch)
    else:
        monkeypatch.delenv(ENVIRONMENT, raising=False)
    arguments = rig_module.planner_arguments(sglang, enable_unified_memory=False, **changes)
    hooked = resolve(sglang.planner_path)
    runtime.planned = None
    assert bool(hooked(arguments)) is bool(hooked.__wrapped__(arguments))
    assert runtime.planned is None
    if switch and not changes:
        assert hooked(arguments)


@pytest.mark.parametrize("layer", [Support.PLANNER_ONLY, None])
@pytest.mark.parametrize("switch", [None, "1"])
def test_without_us_the_planner_is_stocks_but_never_drops_a_reserve_for_nothing(
    sglang: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch, layer: Support | None, switch: str | None
) -> None:
    """Up to 0.5.20 stock plans to size a unified pool that it then never sizes; 0.5.22 really does."""
    if switch:
        monkeypatch.setenv(ENVIRONMENT, switch)
    else:
        monkeypatch.delenv(ENVIRONMENT, raising=False)
    if layer is None:
        monkeypatch.setattr(runtime, "_problems", ["a target was not applied"])
    else:
        monkeypatch.setattr(runtime, "support", layer)
    hooked = resolve(sglang.planner_path)
    arguments = rig_module.planner_arguments(sglang)
    stock = bool(hooked.__wrapped__(arguments))
    assert stock is (switch == "1" and sglang.number != 21)
    assert bool(hooked(arguments)) is (stock and sglang.hardened)
    assert runtime.planned is False


def test_windows_dearer_than_full_layers_are_refused_where_tables_are_short(
    sglang: Any, rig_module: Any, reasons: Any
) -> None:
    arguments = rig_module.planner_arguments(
        sglang, model__full_attention_layer_ids=[0], model__swa_attention_layer_ids=[1, 2, 3]
    )
    short = sglang.family.own_virtual_ids
    assert short is (sglang.number < 20)
    assert reasons(arguments) == ((False, ["window_ids"]) if short else (True, []))


def test_the_copies_that_sglang_imported_are_hooked_too(sglang: Any) -> None:
    if sglang.number < 19:
        pytest.skip("a method: there are no copies of it")
    hooked = resolve(sglang.planner_path)
    for module in ("arg_groups.memory_hook", "model_executor.model_runner_components.kv_pool_runtime"):
        assert resolve(f"sglang.srt.{module}.post_capture_kv_sizing_planned") is hooked
