"""Targets that several families have in common."""

from __future__ import annotations

from kvarena.plugin.engines.sglang.families.targets import HookKind, Shape, Target, Use

__all__ = [
    "ALLOCATORS",
    "BACKPORT",
    "BUFFER_INFOS",
    "MOVE_GATE",
    "NEEDS",
    "PLANNER",
    "REGISTRATION",
    "RESOLUTION",
    "STAGING",
    "SWA_ALLOCATOR",
    "UNMODIFIED",
    "allocator_needs",
    "sizing",
    "storing",
]

_POOLS = "sglang.srt.mem_cache.unified_memory_pool"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_DISAGGREGATION = "sglang.srt.disaggregation"
_STORAGE = "sglang.srt.mem_cache.storage"

PLANNER = Target(
    "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned",
    "server_args",
    body=False,
    handler="planner:plan",
)

#: Since 0.5.19; before, arguments are resolved when they are made.
RESOLUTION = Target(
    "sglang.srt.arg_groups.pipeline.run_resolution_pipeline",
    "server_args",
    body=False,
    handler="resolution:resolve_arguments",
)

#: The size that SGLang would give the pool itself, before capture.
UNMODIFIED = Target(
    f"{_CONFIGURATOR}._profile_available_bytes",
    "self, pre_model_load_memory",
    body=False,
    handler="measure.unmodified:profile_available_bytes",
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
    """Reserve, size and resize: what `Support.BACKPORT` and `Support.NATIVE` both change."""
    return (
        Target(f"{_POOLS}.UnifiedKVPool.__init__", constructor, handler="construct:construct"),
        Target(
            f"{_CONFIGURATOR}.config_from_budget",
            "self, budget_bytes, *, cap_tokens=None",
            handler="finalize:config_from_budget",
        ),
        Target(f"{_RUNNER}.post_capture_resize_kv_pool", resize_runner, handler="finalize:resize_kv_pool"),
        Target(f"{allocator}.resize", "self, config", handler="finalize:resize_allocator"),
    )


#: What releases lack that have no sizing of the unified pool.
BACKPORT = (
    Target(
        f"{_POOLS}.UnifiedSWAKVPool.finalize_backing", "self, config", handler="finalize:finalize_backing"
    ),
    Target(
        f"{_POOLS}.UnifiedSWAKVPool.post_capture_active",
        "",
        handler="construct:post_capture_active",
        kind=HookKind.PROPERTY,
    ),
    Target(
        f"{_POOLS}.UnifiedSWAKVPool.post_capture_backed_bytes",
        "",
        handler="construct:post_capture_backed_bytes",
        kind=HookKind.PROPERTY,
    ),
)

#: Addresses and lengths for transfer engines: what is backed, whichever sub-pool is asked.
BUFFER_INFOS = tuple(
    Target(
        f"{_POOLS}.{pool}.get_contiguous_buf_infos",
        "self",
        handler="buffers:contiguous_buf_infos",
        use=Use.TRANSFERS,
    )
    for pool in ("UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool", "UnifiedMambaPool")
)

REGISTRATION = (
    Target(
        f"{_DISAGGREGATION}.mooncake.conn.MooncakeKVManager.register_buffer_to_engine",
        "self",
        handler="registration:register_mooncake",
        use=Use.MOONCAKE,
    ),
    Target(
        f"{_DISAGGREGATION}.mooncake.conn.MooncakeKVManager.deregister_buffer_to_engine",
        "self",
        handler="registration:deregister_mooncake",
        use=Use.MOONCAKE,
    ),
    Target(
        f"{_DISAGGREGATION}.nixl.conn.NixlKVManager.register_buffer_to_engine",
        "self",
        handler="registration:register_nixl",
        use=Use.NIXL,
    ),
    Target(
        f"{_STORAGE}.mooncake_store.mooncake_direct_linker.MooncakeDirectLinker.register_buffers",
        "self",
        handler="hicache:register_mooncake_linker",
        use=Use.LINKER,
        optional=True,
    ),
    Target(
        f"{_STORAGE}.umbp.umbp_direct_linker.UMBPDirectLinker._register_buffers",
        "self",
        handler="hicache:register_umbp_linker",
        use=Use.LINKER,
        optional=True,
    ),
)

#: Since 0.5.20, the first release in which a pool that is sized after capture can be a decode server's.
MOVE_GATE = (
    Target(
        f"{_DISAGGREGATION}.utils.unified_memory_disagg_move_gate",
        "scheduler",
        handler="move_gate:move_gate",
        use=Use.TRANSFERS,
    ),
)

#: Since 0.5.19; before, staging buffers are registered by a lambda (and PD with unified memory is refused).
STAGING = (
    Target(
        f"{_DISAGGREGATION}.mooncake.conn.MooncakeKVManager._register_staging_memory",
        "self, ptr, size",
        handler="registration:register_staging",
        use=Use.MOONCAKE,
    ),
)


def storing(allocator: str, sub_allocator: str) -> tuple[str, ...]:
    """Classes that store what depends on a pool's size."""
    pools = ("UnifiedKVPool", "UnifiedSWAKVPool", "UnifiedMHATokenToKVPool")
    return (*(f"{_POOLS}.{name}" for name in pools), allocator, sub_allocator)


def allocator_needs(sub_allocator: str) -> tuple[Shape, ...]:
    """What is called on the allocator of one side."""
    return (
        Shape(f"{sub_allocator}.clear", "self"),
        Shape(f"{sub_allocator}.allocated_count", "self"),
        Shape(f"{sub_allocator}.available_size", "self"),
        Shape(f"{sub_allocator}._available_tokens", "self, extra_gap_bytes=0"),
        Shape(f"{sub_allocator}._current_gap_bytes", "self"),
        Shape(f"{sub_allocator}._peer_drainable_hole_bytes", "self"),
    )


#: Called by the handlers.
NEEDS = (
    Shape(f"{_POOLS}.UnifiedKVPool.max_slots", "self, name"),
    Shape(f"{_POOLS}.UnifiedKVPool.min_slot_index", "self, name"),
    Shape(f"{_POOLS}.UnifiedKVPool.spec", "self, name"),
    Shape(f"{_POOLS}.UnifiedKVPool._build_mha_views", "self, spec, anchor_bytes, max_slots, page_size"),
    Shape(f"{_POOLS}.UnifiedKVPool._build_mla_views", "self, spec, anchor_bytes, max_slots, page_size"),
    Shape(f"{_POOLS}.UnifiedKVPool._build_mamba_views", "self, spec, anchor_bytes, max_slots"),
    Shape("sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator", "kvc", body=False),
    Shape(
        "sglang.srt.model_executor.pool_configurator.MemoryPoolConfigurator.calculate_pool_sizes",
        "self, available_bytes, page_size",
        body=False,
    ),
    Shape(
        "sglang.srt.model_executor.pool_configurator.MemoryPoolConfigurator.calculate_pool_sizes_from_max_tokens",
        "self, max_total_num_tokens, page_size",
        body=False,
    ),
    Shape("sglang.srt.distributed.parallel_state.get_world_group", "", body=False),
    Shape("sglang.srt.configs.hybrid_arch.mambaish_config", "model_config", body=False),
)
