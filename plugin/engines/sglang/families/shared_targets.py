"""Targets that several families have in common."""

from __future__ import annotations

from kvarena.plugin.engines.sglang.families.targets import Kind, Shape, Target

__all__ = [
    "ALLOCATORS",
    "BACKPORT",
    "BUFFER_INFOS",
    "NEEDS",
    "PLANNER",
    "REGISTRATION",
    "RESOLUTION",
    "STAGING",
    "SWA_ALLOCATOR",
    "sizing",
]

_POOLS = "sglang.srt.mem_cache.unified_memory_pool"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_DISAGGREGATION = "sglang.srt.disaggregation"
_STORAGE = "sglang.srt.mem_cache.storage"

PLANNER = Target(
    "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned", "server_args", "planner:plan"
)

#: Since 0.5.19; before, arguments are resolved when they are made.
RESOLUTION = Target(
    "sglang.srt.arg_groups.pipeline.run_resolution_pipeline", "server_args", "resolution:resolve_arguments"
)

#: The hybrid-SWA allocator since 0.5.20, and before.
SWA_ALLOCATOR = "sglang.srt.mem_cache.allocator.unified_hybrid_swa.UnifiedSWATokenToKVPoolAllocator"
ALLOCATORS = {
    "0.5.20": (SWA_ALLOCATOR, "sglang.srt.mem_cache.allocator.unified_sub_pool.MultiEndedAllocator"),
    "0.5.16": (
        "sglang.srt.mem_cache.multi_ended_allocator.UnifiedSWATokenToKVPoolAllocator",
        "sglang.srt.mem_cache.multi_ended_allocator.MultiEndedAllocator",
    ),
}


def sizing(
    constructor: str, allocator: str, resize_runner: str = "self, *, draft_runners=()"
) -> tuple[Target, ...]:
    """Reserve, size and resize: what both the back-port and the hardened layer change."""
    return (
        Target(f"{_POOLS}.UnifiedKVPool.__init__", constructor, "construct:construct"),
        Target(
            f"{_CONFIGURATOR}.config_from_budget",
            "self, budget_bytes, *, cap_tokens=None",
            "finalize:config_from_budget",
        ),
        Target(f"{_RUNNER}.post_capture_resize_kv_pool", resize_runner, "finalize:resize_kv_pool"),
        Target(f"{allocator}.resize", "self, config", "finalize:resize_allocator"),
    )


#: What releases lack that have no sizing of the unified pool.
BACKPORT = (
    Target(f"{_POOLS}.UnifiedSWAKVPool.finalize_backing", "self, config", "finalize:finalize_backing"),
    Target(
        f"{_POOLS}.UnifiedSWAKVPool.post_capture_active",
        "",
        "construct:post_capture_active",
        kind=Kind.PROPERTY,
    ),
    Target(
        f"{_POOLS}.UnifiedSWAKVPool.post_capture_backed_bytes",
        "",
        "construct:post_capture_backed_bytes",
        kind=Kind.PROPERTY,
    ),
)

#: Addresses and lengths for transfer engines: what is backed, whichever sub-pool is asked.
BUFFER_INFOS = tuple(
    Target(f"{_POOLS}.{pool}.get_contiguous_buf_infos", "self", "buffers:contiguous_buf_infos")
    for pool in ("UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool", "UnifiedMambaPool")
)

REGISTRATION = (
    Target(
        f"{_DISAGGREGATION}.mooncake.conn.MooncakeKVManager.register_buffer_to_engine",
        "self",
        "registration:register_mooncake",
    ),
    Target(
        f"{_DISAGGREGATION}.mooncake.conn.MooncakeKVManager.deregister_buffer_to_engine",
        "self",
        "registration:deregister_mooncake",
    ),
    Target(
        f"{_DISAGGREGATION}.nixl.conn.NixlKVManager.register_buffer_to_engine",
        "self",
        "registration:register_nixl",
    ),
    Target(
        f"{_STORAGE}.mooncake_store.mooncake_direct_linker.MooncakeDirectLinker.register_buffers",
        "self",
        "hicache:register_mooncake_linker",
        optional=True,
    ),
    Target(
        f"{_STORAGE}.umbp.umbp_direct_linker.UMBPDirectLinker._register_buffers",
        "self",
        "hicache:register_umbp_linker",
        optional=True,
    ),
)

#: Since 0.5.19; before, staging buffers are registered by a lambda (and PD with unified memory is refused).
STAGING = (
    Target(
        f"{_DISAGGREGATION}.mooncake.conn.MooncakeKVManager._register_staging_memory",
        "self, ptr, size",
        "registration:register_staging",
    ),
)

#: Called by the handlers.
NEEDS = (
    Shape(f"{_POOLS}.UnifiedKVPool._build_mha_views", "self, spec, anchor_bytes, max_slots, page_size"),
    Shape(f"{_POOLS}.UnifiedKVPool._build_mla_views", "self, spec, anchor_bytes, max_slots, page_size"),
    Shape(f"{_POOLS}.UnifiedKVPool._build_mamba_views", "self, spec, anchor_bytes, max_slots"),
    Shape("sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator", "kvc"),
    Shape(
        "sglang.srt.model_executor.pool_configurator.MemoryPoolConfigurator.calculate_pool_sizes",
        "self, available_bytes, page_size",
    ),
    Shape(
        "sglang.srt.model_executor.pool_configurator.MemoryPoolConfigurator.calculate_pool_sizes_from_max_tokens",
        "self, max_total_num_tokens, page_size",
    ),
    Shape("sglang.srt.distributed.parallel_state.get_world_group", ""),
    Shape("sglang.srt.configs.hybrid_arch.mambaish_config", "model_config"),
)
