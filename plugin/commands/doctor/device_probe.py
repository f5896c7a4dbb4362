"""A child that tries what kvarena needs of a device: addresses, handles, mappings, sharing, swapping."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvarena.errors import KvArenaError
from kvarena.plugin.commands.doctor.blocks import make_block
from kvarena.plugin.commands.doctor.child import emit, take_stdout

__all__ = ["main", "probe"]

_TRIED_BYTES = 32 << 20


def main(arguments: Sequence[str]) -> int:
    """Probe the device named on the command line, ``cpu``, ``cuda`` or ``cuda:1``."""
    take_stdout()
    try:
        emit(probe(arguments[0]))
    except KvArenaError as error:
        emit({"error": str(error)})
    return 0


def probe(device: str) -> dict[str, Any]:
    """Everything about a device, by trying it.

    Raises
    ------
    KvArenaError
        The device has no virtual memory that kvarena can use.
    """
    found: dict[str, Any] = {"device": device, "torch": importlib.metadata.version("torch")}
    driver: Any
    if device.startswith("cuda"):
        from kvarena.pool.cuda_vmm import CudaVmm

        driver = CudaVmm(device)
        found |= _cuda(driver)
    else:
        from kvarena.pool.host_vmm import HostVmm

        driver = HostVmm()
        found["handle_types"] = {"memfd": _tried(lambda: _share(driver))}
    found |= {
        "driver": driver.name,
        "granularity": driver.granularity,
        "rdma_capable": driver.rdma_capable,
        "free_bytes": driver.free_bytes(),
    }
    return found | _swap(driver)


def _swap(driver: Any) -> dict[str, Any]:
    """A sink, swapped for one larger handle at the same address: what finalize does."""
    from kvarena.pool.arena import Arena

    nbytes = min(_TRIED_BYTES, driver.free_bytes() // 2 // driver.granularity * driver.granularity)
    if nbytes < 2 * driver.granularity:
        raise KvArenaError(
            f"{driver.free_bytes()} bytes are free, too few to try anything.",
            fix="Free memory on the device.",
        )
    with Arena(driver, nbytes) as arena:
        arena.back(driver.granularity)
        # Made before the swap, as captured graphs hold it.
        memory = make_block(arena)
        began = time.perf_counter()
        arena.back(nbytes)
        milliseconds = (time.perf_counter() - began) * 1e3
        memory.fill(7)
        return {"swapped_bytes": nbytes, "swap_ms": milliseconds, "swapped_in_place": memory.holds(7)}


def _share(driver: Any) -> None:
    """Export a handle as a file descriptor, and import it again."""
    handle = driver.create(driver.granularity)
    try:
        fd = driver.export_fd(handle)
        try:
            driver.release(driver.import_fd(fd, driver.granularity))
        finally:
            os.close(fd)
    finally:
        driver.release(handle)


def _cuda(driver: Any) -> dict[str, Any]:
    import torch
    from kvarena.pool import _cuda_api as cuda

    types = cuda.load().CUmemAllocationHandleType

    def fabric() -> None:
        kind = types.CU_MEM_HANDLE_TYPE_FABRIC
        handle = cuda.call("cuMemCreate", driver.granularity, driver._allocation_prop(int(kind)), 0)
        try:
            cuda.call("cuMemExportToShareableHandle", handle, kind, 0)
        finally:
            driver.release(int(handle))

    # A block that is allocated and freed stays in torch's cache, where no driver call can see it.
    block = torch.empty(256 << 20, dtype=torch.uint8, device=driver.device)
    del block
    properties = torch.cuda.get_device_properties(driver.device)
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "driver_version": int(cuda.call("cuDriverGetVersion")),
        "handle_types": {"posix_fd": _tried(lambda: _share(driver)), "fabric": _tried(fabric)},
        "torch_cache_released": driver.release_cached(),
        "torch_cache_left": torch.cuda.memory_reserved(driver.device),
    }


def _tried(attempt: Callable[[], None]) -> str:
    """``"works"``, or why not."""
    try:
        attempt()
    except (KvArenaError, TypeError, ValueError, AttributeError) as error:
        return str(getattr(error, "code", None) or error)
    return "works"
