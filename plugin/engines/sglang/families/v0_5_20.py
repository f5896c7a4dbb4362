"""SGLang 0.5.19 and 0.5.20: the planner is a function, the two sides have fixed token counts.

0.5.19 keeps its allocators where 0.5.18 had them, and its window side's table is too short.
"""

from __future__ import annotations

import dataclasses

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

__all__ = ["FAMILY", "FAMILY_0_5_19"]


def _family(
    name: str,
    release: str,
    allocators: str,
    buffers: tuple[Target, ...],
    *,
    resize_runner: str,
    compute: str,
    decided_late: tuple[Target, ...] = (),
) -> Family:
    allocator, sub_allocator = ALLOCATORS[allocators]
    return Family(
        name=name,
        releases=(release,),
        support=Support.BACKPORT,
        targets=(
            PLANNER,
            RESOLUTION,
            *decided_late,
            *sizing(
                "self, *, total_bytes, sub_pool_specs, device, enable_memory_saver, page_size=1",
                allocator,
                resize_runner,
            ),
            Target(
                "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._init_unified_swa_pools",
                "self, *, max_num_reqs, full_max_total_num_tokens, swa_max_total_num_tokens, "
                "unified_total_bytes=None",
                handler="construct:in_configurator",
            ),
            Target(
                "sglang.srt.mem_cache.unified_memory_pool.init_unified_swa_pools",
                "*, device, kv_cache_dtype, head_num, head_dim, v_head_dim, swa_head_num, swa_head_dim, "
                "swa_v_head_dim, page_size, start_layer, end_layer, swa_attention_layer_ids, "
                "full_attention_layer_ids, full_max_total_num_tokens, swa_max_total_num_tokens, "
                "enable_memory_saver, need_sort, forward_stream=None, lazy_compaction=False, "
                "unified_total_bytes=None, model_context_len=None, sliding_window_size=None",
                handler="construct:factory",
            ),
            *BACKPORT,
            *buffers,
            *REGISTRATION,
            *STAGING,
        ),
        needs=(
            *NEEDS,
            *allocator_needs(sub_allocator),
            Shape(
                "sglang.srt.model_executor.model_runner_components.kv_pool_runtime."
                "compute_post_capture_kv_resize",
                compute,
            ),
        ),
        lacks=("sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool.finalize_backing",),
        storing=storing(allocator, sub_allocator),
        size_rule=SizeRule.BLOCKS,
        shared_budget=False,
        budget_fields=("unified_total_bytes",),
        ignores_unified=True,
    )


FAMILY = _family(
    "0.5.20",
    "0.5.20",
    "0.5.20",
    (*BUFFER_INFOS, *MOVE_GATE),
    resize_runner="self, *, draft_runners=()",
    compute="model_runner, *, draft_runners=()",
    decided_late=(UNMODIFIED,),
)
FAMILY_0_5_19 = dataclasses.replace(
    _family("0.5.19", "0.5.19", "0.5.16", BUFFER_INFOS[1:], resize_runner="self", compute="model_runner"),
    experimental=("0.5.19",),
    own_virtual_ids=True,
)
