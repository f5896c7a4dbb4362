"""Which Mooncake is installed, and why it does not load."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from kvarena.transfer.errors import EngineUnavailable

__all__ = ["VARIANTS", "installed_variants", "load_transfer_engine"]

VARIANTS = {
    "mooncake-transfer-engine-non-cuda": "mooncake-cpu",
    "mooncake-transfer-engine": "mooncake-cu12",
    "mooncake-transfer-engine-cuda13": "mooncake-cu13",
}
"""Distributions that ship ``mooncake/engine.so``, and our extra for each."""

# A library that the extension needs -> what brings it.
_LIBRARIES = {
    "libibverbs.so.1": "Install the system package libibverbs1 (apt-get install libibverbs1).",
    "libmlx5.so.1": "Install the system package ibverbs-providers.",
    "libnuma.so.1": "Install the system package libnuma1.",
    "libcurl.so.4": "Install the system package libcurl4.",
    "libcuda.so.1": (
        "There is no NVIDIA driver here: install kvarena[mooncake-cpu] instead, or run where the driver is."
    ),
    "libcudart.so.12": "Install nvidia-cuda-runtime-cu12, or kvarena[mooncake-cu13] under CUDA 13.",
    "libcudart.so.13": "Install nvidia-cuda-runtime, or kvarena[mooncake-cu12] under CUDA 12.",
}
_INSTALL = "Install exactly one of kvarena[mooncake-cpu], kvarena[mooncake-cu12] and kvarena[mooncake-cu13]."


def installed_variants() -> tuple[tuple[str, str], ...]:
    """Name and version of every installed distribution that ships the ``mooncake`` package."""
    found = set()
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name.startswith("mooncake-transfer-engine"):
            found.add((name, distribution.version))
    return tuple(sorted(found))


def load_transfer_engine() -> Any:
    """Mooncake's ``TransferEngine`` class.

    Raises
    ------
    EngineUnavailable
        No variant is installed, more than one is, or the one cannot load; names what to install.
    """
    variants = installed_variants()
    named = ", ".join(f"{name} {version}" for name, version in variants)
    if len(variants) > 1:
        raise EngineUnavailable(
            "mooncake",
            f"{named} are installed together, and each overwrites the other's mooncake/engine.so",
            fix=f"Uninstall all of them. {_INSTALL}",
        )
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        why = f"{named} is installed, but broken ({error})" if variants else "Mooncake is not installed"
        raise EngineUnavailable("mooncake", why, fix=_INSTALL) from error
    except (ImportError, AttributeError) as error:
        missing = next((library for library in _LIBRARIES if library in str(error)), None)
        fix = _INSTALL if missing is None else _LIBRARIES[missing]
        raise EngineUnavailable(
            "mooncake", f"{named or 'Mooncake'} does not load ({error})", fix=fix
        ) from error
