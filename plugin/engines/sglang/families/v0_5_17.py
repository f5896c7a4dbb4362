"""SGLang 0.5.16 to 0.5.18: the planner is a method of ServerArgs, the allocators lie in one module."""

from __future__ import annotations

from kvarena.plugin.engines.sglang.families.shared_targets import (
    ALLOCATORS,
    BACKPORT,
    NEEDS,
    REGISTRATION,
    allocator_needs,
    sizing,
    storing,
)
from kvarena.plugin.engines.sglang.families.targets import Family, Shape, SizeRule, Support, Target

__all__ = ["FAMILY"]

_ALLOCATOR, _SUB_ALLOCATOR = ALLOCATORS["0.5.16"]

FAMILY = Family(
    name="0.5.16 to 0.5.18",
    releases=("0.5.16", "0.5.17", "0.5.18"),
    experimental=("0.5.17", "0.5.18"),
    support=Support.BACKPORT,
    targets=(
        Target(
            "sglang.srt.server_args.ServerArgs.post_capture_kv_sizing_planned",
            "self",
            body=False,
            handler="planner:plan",
        ),
        Target(
            "sglang.srt.server_args.ServerArgs.__post_init__",
            "self",
            body=False,
            handler="resolution:resolve_arguments",
        ),
        *sizing(
            "self, *, total_bytes, sub_pool_specs, device, enable_memory_saver, page_size=1, "
            "view_tail_pad_bytes=0",
            _ALLOCATOR,
            resize_runner="self",
        ),
        Target(
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._init_unified_swa_pools",
            "self, *, max_num_reqs, full_max_total_num_tokens, swa_max_total_num_tokens",
            handler="construct:in_configurator",
        ),
        Target(
            "sglang.srt.mem_cache.unified_memory_pool.init_unified_swa_pools",
            "*, device, kv_cache_dtype, head_num, head_dim, v_head_dim, swa_head_num, swa_head_dim, "
            "swa_v_head_dim, page_size, start_layer, end_layer, swa_attention_layer_ids, "
            "full_attention_layer_ids, full_max_total_num_tokens, swa_max_total_num_tokens, "
            "enable_memory_saver, need_sort, forward_stream=None, lazy_compaction=False",
            handler="construct:factory",
        ),
        *BACKPORT,
        *REGISTRATION,
    ),
    needs=(
        *NEEDS,
        *allocator_needs(_SUB_ALLOCATOR),
        Shape(
            "sglang.srt.model_executor.model_runner_components.kv_pool_runtime.compute_post_capture_kv_resize",
            "model_runner",
        ),
    ),
    lacks=("sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool.finalize_backing",),
    storing=storing(_ALLOCATOR, _SUB_ALLOCATOR),
    size_rule=SizeRule.SLOTS,
    shared_budget=False,
    budget_fields=(),
    ignores_unified=True,
    own_virtual_ids=True,
)
