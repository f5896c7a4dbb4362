"""SGLang 0.5.22 and later: hybrid-SWA pools are sized after capture by SGLang itself."""

from __future__ import annotations

from kvarena.plugin.engines.sglang.families.shared_targets import (
    ALLOCATORS,
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
    name="0.5.22 and later",
    releases=("0.5.22", "0.5.23"),
    support=Support.NATIVE,
    targets=(
        PLANNER,
        RESOLUTION,
        UNMODIFIED,
        *sizing(
            "self, *, total_bytes, sub_pool_specs, device, enable_memory_saver, page_size=1, "
            "post_capture_active=False, bs1_floor_terms=None, fused_draft=None",
            _ALLOCATOR,
        ),
        Target(
            "sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool.finalize_backing",
            "self, config",
            handler="finalize:finalize_backing",
        ),
        *BUFFER_INFOS,
        *MOVE_GATE,
        *REGISTRATION,
        *STAGING,
    ),
    needs=(
        *NEEDS,
        *allocator_needs(_SUB_ALLOCATOR),
        Shape("sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool._initialize_raw", "self, raw"),
        Shape(
            "sglang.srt.model_executor.model_runner_components.kv_pool_runtime.compute_post_capture_kv_resize",
            "model_runner, *, draft_runners=()",
        ),
    ),
    storing=storing(_ALLOCATOR, _SUB_ALLOCATOR),
    bodies=(
        f"{_SUB_ALLOCATOR}._set_capacity",
        "sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool.active_allocation_bytes",
        "sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool.post_capture_backed_bytes",
    ),
    size_rule=SizeRule.PAGES,
)
