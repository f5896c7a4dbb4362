"""SGLang 0.5.21: the two sides share the pool's bytes; the planner rejects unified memory."""

from __future__ import annotations

from kvarena.plugin.engines.sglang.families.shared_targets import (
    ALLOCATORS,
    BACKPORT,
    BUFFER_INFOS,
    MOVE_GATE,
    NEEDS,
    PLANNER,
    REGISTRATION,
    RESOLUTION,
    STAGING,
    UNMODIFIED,
    allocator_needs,
    sizing,
    storing,
)
from kvarena.plugin.engines.sglang.families.targets import Family, Shape, SizeRule, Support, Target

__all__ = ["FAMILY"]

_ALLOCATOR, _SUB_ALLOCATOR = ALLOCATORS["0.5.20"]

FAMILY = Family(
    name="0.5.21",
    releases=("0.5.21",),
    support=Support.BACKPORT,
    targets=(
        PLANNER,
        RESOLUTION,
        UNMODIFIED,
        *sizing("self, *, total_bytes, sub_pool_specs, device, enable_memory_saver, page_size=1", _ALLOCATOR),
        Target(
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._init_unified_swa_pools",
            "self, *, max_num_reqs, full_max_total_num_tokens=None, swa_max_total_num_tokens=None, "
            "unified_memory_pool_bytes=None, unified_total_bytes=None",
            handler="construct:in_configurator",
        ),
        Target(
            "sglang.srt.mem_cache.unified_memory_pool.init_unified_swa_pools",
            "*, device, kv_cache_dtype, head_num, head_dim, v_head_dim, swa_head_num, swa_head_dim, "
            "swa_v_head_dim, page_size, start_layer, end_layer, swa_attention_layer_ids, "
            "full_attention_layer_ids, full_max_total_num_tokens=None, swa_max_total_num_tokens=None, "
            "total_bytes=None, enable_memory_saver, need_sort, forward_stream=None, lazy_compaction=False, "
            "model_context_len=None, sliding_window_size=None",
            handler="construct:factory",
        ),
        *BACKPORT,
        *BUFFER_INFOS,
        *MOVE_GATE,
        *REGISTRATION,
        *STAGING,
    ),
    needs=(
        *NEEDS,
        *allocator_needs(_SUB_ALLOCATOR),
        Shape("sglang.srt.arg_groups.overrides.resolving_view", "server_args", body=False),
        Shape(
            "sglang.srt.model_executor.model_runner_components.kv_pool_runtime.compute_post_capture_kv_resize",
            "model_runner, *, draft_runners=()",
        ),
    ),
    lacks=("sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool.finalize_backing",),
    storing=storing(_ALLOCATOR, _SUB_ALLOCATOR),
    size_rule=SizeRule.BLOCKS,
)
