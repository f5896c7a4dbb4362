"""Which NIXL is installed, why it does not load, and when UCX will be slow."""

from __future__ import annotations

import importlib
import os
from typing import Any

from kvarena.transfer.errors import EngineUnavailable

__all__ = ["load_nixl", "slow_path_reason"]

# The first is a shim that chooses between the others by the CUDA it finds.
_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")


def load_nixl() -> tuple[Any, Any]:
    """NIXL's ``_api`` and ``_bindings`` modules.

    Raises
    ------
    EngineUnavailable
        None is installed, or none loads; names what to install.
    """
    # NIXL logs to standard output, where a program's answer may be wanted.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    broken = []
    for module in _MODULES:
        try:
            return importlib.import_module(f"{module}._api"), importlib.import_module(f"{module}._bindings")
        except ModuleNotFoundError as error:
            if error.name not in (module, f"{module}._api", f"{module}._bindings"):
                broken.append(f"{module} is installed, but {error.name} is missing")
        except ImportError as error:
            broken.append(f"{module} does not load ({error})")
    raise EngineUnavailable(
        "nixl",
        "; ".join(broken) or "NIXL is not installed",
        fix="Install kvarena[nixl-cu12], or kvarena[nixl-cu13] under CUDA 13.",
    )


def slow_path_reason(*, memory: str, vmm: bool, fabric: bool, same_host: bool = True) -> str | None:
    """Why UCX will fall back to software emulation for this memory, or None if it will not.

    Parameters
    ----------
    memory : {"DRAM", "VRAM"}
        Where the arena is.
    vmm : bool
        It is mapped through CUDA's virtual memory management, as every CUDA arena is.
    fabric : bool
        Its handles were created with the FABRIC type, which the host must permit.
    same_host : bool
        The peer is on this host. Between hosts UCX may use a network card instead.

    Notes
    -----
    Measured on an H200 with NIXL 1.5.1: 0.44 GB/s for such memory, 862 GB/s for cudaMalloc memory.
    """
    if memory != "VRAM" or not vmm or fabric:
        return None
    instead = (
        "set KVARENA_SAME_HOST=1 (or --transfer same-host), which maps the peer's arena"
        if same_host
        else "use Mooncake over RDMA, or a host that permits fabric handles"
    )
    return (
        "UCX cannot map CUDA VMM memory without a fabric handle and emulates every write over TCP: "
        f"0.44 GB/s were measured where cudaMalloc memory moved at 862 GB/s. Instead, {instead}."
    )
