"""A plan's numbers are those of the pool and the allocators that are built from it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from kvarena.plugin.commands.plan.capacity import Split, capacity, floor_bytes, max_slots
from kvarena.plugin.commands.plan.errors import PlanError
from kvarena.plugin.commands.plan.ranks import CacheDtypes, rank_geometry
from kvarena.plugin.commands.plan.read import geometry_from_config
from kvarena.plugin.commands.plan.specs import pool_specs
from kvarena.pool import HostVmm, MultiEndedAllocator, UnifiedKVPool, resize_for

NAMES = list(json.loads((Path(__file__).parent / "data" / "expected.json").read_text()))

HYBRID_SWA = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 6,
    "sliding_window": 24,
}
HYBRID_MAMBA = {
    "model_type": "granitemoehybrid",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
}


def built(config, dtypes=None):
    model = geometry_from_config(config)
    rank = rank_geometry(model, tp=1, dtypes=dtypes or CacheDtypes())
    return rank, pool_specs(model, rank, dtypes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv", ["bfloat16", "fp8_e4m3"])
def test_entry_and_page_bytes_are_the_layouts(name, kv, config):
    rank, specs = built(config(name), CacheDtypes(kv=kv))
    for pool, spec in zip(rank.sub_pools, specs, strict=True):
        assert pool.name == spec.name
        assert pool.entry_bytes == spec.entry_bytes()
        assert pool.page_bytes(16) == spec.page_envelope_bytes(16)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 3, "conv_L_cache": 3},
        {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"] * 3},
    ],
)
def test_states_with_one_part_have_a_layout_too(change):
    rank, specs = built({**HYBRID_SWA, "sliding_window": None, **change})
    assert [pool.entry_bytes for pool in rank.sub_pools] == [spec.entry_bytes() for spec in specs]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("config", [HYBRID_SWA, HYBRID_MAMBA, LATENT], ids=["swa", "mamba", "mla"])
def test_sink_floor_and_sides_are_the_pool_s(config, page_size):
    rank, specs = built(config)
    total = 3 << 20
    pool = UnifiedKVPool(
        total_bytes=total,
        sub_pool_specs=specs,
        driver=HostVmm(),
        page_size=page_size,
        bs1_floor_terms=rank.floor_terms(page_size),
    )
    with closing(pool):
        assert rank.sink_bytes(page_size) == pool.sink_bytes
        assert floor_bytes(rank, page_size) == pool.floor_bytes
        sides = max_slots(rank, total, page_size)
        assert sides == {
            spec.name: (pool.num_pages(spec.name) - pool.min_page_index(spec.name))
            * pool.slots_per_page(spec.name)
            for spec in pool.sub_pool_specs
        }
        resize = resize_for(pool, total)
        assert resize.full_max_total_num_tokens == sides["full"]
        assert resize.swa_max_total_num_tokens == sides.get("swa")


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_allocators_give_out_what_was_planned_to_the_token(page_size):
    rank, specs = built(HYBRID_MAMBA)
    total, requests = 1_234_567, 7
    plan = capacity([rank], total, page_size=page_size, split=Split(running_requests=requests))
    pool = UnifiedKVPool(total_bytes=total, sub_pool_specs=specs, driver=HostVmm(), page_size=page_size)
    with closing(pool):
        states = MultiEndedAllocator(pool, "mamba")
        tokens = MultiEndedAllocator(pool, "full")
        states.bind_peer(tokens)
        assert states.alloc(requests) is not None
        assert tokens.available_size() == plan.tokens
        assert tokens.alloc(plan.tokens) is not None
        assert tokens.alloc(page_size) is None


def test_rows_of_several_sizes_have_no_layout():
    with pytest.raises(PlanError, match="rows of several sizes"):
        built({**HYBRID_SWA, "sliding_window": None, "num_key_value_heads": [1, 2, 2, 2, 2, 2]})
