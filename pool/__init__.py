"""Memory: drivers, the arena, layouts, pools, allocators, and sizing.

The names are loaded on first use, so that ``kvarena.pool.errors`` costs no
import of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarena.pool.arena import Arena, ArenaState, Mapping
    from kvarena.pool.cuda_vmm import CudaVmm
    from kvarena.pool.driver import Driver
    from kvarena.pool.errors import (
        AllocatorError,
        ArenaStateError,
        DriverError,
        DriverUnavailableError,
        LayoutError,
        OutOfMemoryError,
        PoolSizeError,
        PoolStateError,
        RefusedError,
    )
    from kvarena.pool.host_vmm import HostVmm
    from kvarena.pool.layout import MambaSubPoolSpec, MHASubPoolSpec, MLASubPoolSpec, SubPoolSpec
    from kvarena.pool.multi_ended_allocator import MultiEndedAllocator
    from kvarena.pool.refusals import Refusal, SizingPlan, SizingRequest, post_capture_kv_sizing_planned
    from kvarena.pool.sizing import (
        PoolCost,
        PostCaptureKVResize,
        RanksDisagreeError,
        SubPoolCost,
        agree,
        resize_for,
        smaller_resize,
        tokens_for_budget,
    )
    from kvarena.pool.unified_kv_pool import ContiguousBufInfos, UnifiedKVPool
    from kvarena.pool.unified_swa_allocator import UnifiedSWATokenToKVPoolAllocator

__all__ = [
    "AllocatorError",
    "Arena",
    "ArenaState",
    "ArenaStateError",
    "ContiguousBufInfos",
    "CudaVmm",
    "Driver",
    "DriverError",
    "DriverUnavailableError",
    "HostVmm",
    "LayoutError",
    "MHASubPoolSpec",
    "MLASubPoolSpec",
    "MambaSubPoolSpec",
    "Mapping",
    "MultiEndedAllocator",
    "OutOfMemoryError",
    "PoolCost",
    "PoolSizeError",
    "PoolStateError",
    "PostCaptureKVResize",
    "RanksDisagreeError",
    "Refusal",
    "RefusedError",
    "SizingPlan",
    "SizingRequest",
    "SubPoolCost",
    "SubPoolSpec",
    "UnifiedKVPool",
    "UnifiedSWATokenToKVPoolAllocator",
    "agree",
    "post_capture_kv_sizing_planned",
    "resize_for",
    "smaller_resize",
    "tokens_for_budget",
]

_NAMES = {
    "arena": (
        "Arena",
        "ArenaState",
        "Mapping",
    ),
    "cuda_vmm": ("CudaVmm",),
    "driver": ("Driver",),
    "errors": (
        "AllocatorError",
        "ArenaStateError",
        "DriverError",
        "DriverUnavailableError",
        "LayoutError",
        "OutOfMemoryError",
        "PoolSizeError",
        "PoolStateError",
        "RefusedError",
    ),
    "host_vmm": ("HostVmm",),
    "layout": (
        "MHASubPoolSpec",
        "MLASubPoolSpec",
        "MambaSubPoolSpec",
        "SubPoolSpec",
    ),
    "multi_ended_allocator": ("MultiEndedAllocator",),
    "refusals": (
        "Refusal",
        "SizingPlan",
        "SizingRequest",
        "post_capture_kv_sizing_planned",
    ),
    "sizing": (
        "PoolCost",
        "PostCaptureKVResize",
        "RanksDisagreeError",
        "SubPoolCost",
        "agree",
        "resize_for",
        "smaller_resize",
        "tokens_for_budget",
    ),
    "unified_kv_pool": (
        "ContiguousBufInfos",
        "UnifiedKVPool",
    ),
    "unified_swa_allocator": ("UnifiedSWATokenToKVPoolAllocator",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
