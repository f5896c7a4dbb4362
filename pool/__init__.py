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
    from kvarena.pool.host_vmm import HostVmm
    from kvarena.pool.layout import MambaSubPoolSpec, MHASubPoolSpec, MLASubPoolSpec, SubPoolSpec
    from kvarena.pool.unified_kv_pool import UnifiedKVPool

__all__ = [
    "Arena",
    "ArenaState",
    "CudaVmm",
    "Driver",
    "HostVmm",
    "MHASubPoolSpec",
    "MLASubPoolSpec",
    "MambaSubPoolSpec",
    "Mapping",
    "SubPoolSpec",
    "UnifiedKVPool",
]

_MODULE_OF = {
    "Arena": "arena",
    "ArenaState": "arena",
    "CudaVmm": "cuda_vmm",
    "Driver": "driver",
    "HostVmm": "host_vmm",
    "MHASubPoolSpec": "layout",
    "MLASubPoolSpec": "layout",
    "MambaSubPoolSpec": "layout",
    "Mapping": "arena",
    "SubPoolSpec": "layout",
    "UnifiedKVPool": "unified_kv_pool",
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
