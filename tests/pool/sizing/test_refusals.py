from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from kvarena.pool import SizingRequest, post_capture_kv_sizing_planned

GOOD = SizingRequest(enabled=True, chunked_prefill_size=2048, prefill_captured_sizes=(512, 2048))

CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"enabled": False}, "disabled", "enabled", "not asked for"),
    ({"device": "xpu", "driver": None}, "no_driver", "driver", "xpu"),
    ({"memory_saver": True}, "memory_saver", "memory_saver", "unmaps"),
    ({"custom_mem_pool": "NVLINK"}, "custom_mem_pool", "custom_mem_pool", "NVLINK"),
    ({"transfer_backend": "mooncake", "transfer_protocol": "EFA"}, "efa", "transfer_protocol", "EFA"),
    ({"dcp_size": 4}, "decode_context_parallel", "dcp_size", "4 ranks"),
    ({"context_parallel_size": 2}, "context_parallel", "context_parallel_size", "2 ranks"),
    ({"ray": True}, "ray", "ray", "Ray"),
    ({"is_draft_worker": True}, "draft_worker", "is_draft_worker", "draft"),
    ({"speculative_algorithm": "EAGLE"}, "speculative", "speculative_algorithm", "EAGLE"),
    ({"draft_runners": 2}, "speculative", "speculative_algorithm", "2 draft"),
    ({"decode_graphs": False}, "no_decode_graphs", "decode_graphs", "not captured"),
    ({"prefill_graphs": False}, "no_prefill_graphs", "prefill_graphs", "not captured"),
    ({"chunked_prefill_size": 4096}, "prefill_not_covered", "chunked_prefill_size", "4096"),
    ({"chunked_prefill_size": -1}, "prefill_not_covered", "chunked_prefill_size", "no bound"),
    ({"chunked_prefill_size": None}, "prefill_not_covered", "chunked_prefill_size", "no bound"),
    ({"prefill_captured_sizes": ()}, "prefill_not_covered", "chunked_prefill_size", "has 0"),
    ({"unified": False}, "not_unified", "unified", "unified"),
    ({"hybrid": False}, "not_hybrid", "hybrid", "sliding-window"),
    ({"sub_pool_kinds": ("mha", "mamba")}, "unsupported_kind", "sub_pool_kinds", "mamba"),
    ({"hisparse": True}, "hisparse", "hisparse", "HiSparse"),
    ({"kv_cache_sharding": True}, "kv_cache_sharding", "kv_cache_sharding", "shard"),
    ({"kv_cache_disabled": True}, "no_kv_cache", "kv_cache_disabled", "no KV"),
]


def test_a_good_configuration_is_planned() -> None:
    plan = post_capture_kv_sizing_planned(GOOD)
    assert plan
    assert (plan.planned, plan.refusals) == (True, ())


@pytest.mark.parametrize(("change", "code", "setting", "text"), CASES)
def test_each_setting_is_refused_by_its_name(
    change: dict[str, Any], code: str, setting: str, text: str
) -> None:
    plan = post_capture_kv_sizing_planned(replace(GOOD, **change))
    assert not plan
    assert [(refusal.code, refusal.setting) for refusal in plan.refusals] == [(code, setting)]
    assert text in plan.refusals[0].reason


def test_every_reason_comes_at_once() -> None:
    changes: dict[str, Any] = {}
    for change, *_ in CASES:
        changes = {**change, **changes}
    plan = post_capture_kv_sizing_planned(replace(GOOD, **changes))
    codes = {refusal.code for refusal in plan.refusals}
    # Without prefill graphs, which sizes are captured is no question.
    assert codes == {code for _, code, _, _ in CASES} - {"prefill_not_covered"}
    assert all(refusal.reason for refusal in plan.refusals)


@pytest.mark.parametrize(
    "change",
    [
        {"role": "prefill", "decode_graphs": False},
        {"role": "decode", "prefill_graphs": False, "chunked_prefill_size": None},
        {"role": "decode", "prefill_captured_sizes": ()},
        {"driver": "host", "device": "cpu"},
        {"transfer_backend": "mooncake", "transfer_protocol": "rdma"},
        {"draft_runners": 0, "speculative_algorithm": None},
    ],
)
def test_what_a_role_never_runs_is_not_asked_for(change: dict[str, Any]) -> None:
    assert post_capture_kv_sizing_planned(replace(GOOD, **change)).refusals == ()


def test_the_engines_own_names_are_used() -> None:
    request = replace(GOOD, memory_saver=True, setting_names={"memory_saver": "--enable-memory-saver"})
    assert post_capture_kv_sizing_planned(request).refusals[0].setting == "--enable-memory-saver"


def test_every_setting_that_can_refuse_is_a_field() -> None:
    names = {each.name for each in fields(SizingRequest)}
    assert {setting for _, _, setting, _ in CASES} <= names
