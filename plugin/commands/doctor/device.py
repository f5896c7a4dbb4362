"""The device: its driver, the handles that work on it, and what torch keeps of its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvarena.plugin.byte_sizes import format_bytes
from kvarena.plugin.commands.doctor.child import Child, ChildFailed
from kvarena.plugin.commands.doctor.findings import Finding
from kvarena.plugin.commands.terminal import printable
from kvarena.plugin.observe.status.files import Found
from kvarena.pool import descriptor_limits, descriptors_needed

__all__ = ["choose_device", "examine_device", "probe_device", "processes"]

_TIMEOUT_S = 120.0
_INFINIBAND = Path("/sys/class/infiniband")
# What a pool may come to that grows in steps; on an H200, steps of a gigabyte.
_HANDLES = 128


def choose_device() -> str:
    """``"cuda"`` where an NVIDIA driver has made a device, else ``"cpu"``."""
    dev = Path("/dev")
    return "cuda" if [*dev.glob("nvidia[0-9]*"), *dev.glob("dxg")] else "cpu"


def probe_device(device: str) -> dict[str, Any] | Finding:
    """What a child found by trying, or why it could not."""
    with Child("device_probe", [device]) as child:
        try:
            return child.answer(_TIMEOUT_S)
        except ChildFailed as failure:
            fix = "Set --device cpu to look at the host's memory instead." if device != "cpu" else ""
            return Finding(topic="device", verdict="broken", what=f"{device}: {failure}", fix=fix)


def examine_device(found: dict[str, Any]) -> Iterator[Finding]:
    """Put a probe's figures into words."""
    yield Finding(topic="device", verdict="ok", what=_device(found), data=found)
    if found["driver"] == "host":
        yield Finding(
            topic="device",
            verdict="note",
            what="no GPU here: pools are made of memfds in host memory, for tests and the demo",
        )
    yield _handles(found["handle_types"])
    yield _swap(found)
    yield from _descriptors(found["driver"])
    if "torch_cache_released" in found:
        yield _torch_cache(found)
    if found["driver"] != "host":
        yield _rdma(found)


def processes(found: Sequence[Found]) -> Iterator[Finding]:
    """What running kvarena processes hold, and what torch caches in them (invisible to the driver)."""
    for each in found:
        if each.state == "running" and each.status is not None:
            pool = each.status.pool
            cached = pool.torch_cached_bytes or 0
            what = (
                f"{printable(each.status.name)} (pid {each.status.identity.pid}) holds "
                f"{format_bytes(pool.backed_bytes)} of {format_bytes(pool.reserved_bytes)} "
                f"on {printable(pool.device)}"
            )
            if cached:
                what += f"; torch caches {format_bytes(cached)} more in it, which no driver call sees"
            yield Finding(
                topic="running",
                verdict="note",
                what=what,
                data={"pid": each.status.identity.pid, "torch_cached_bytes": cached},
            )
        elif each.state == "unreadable":
            yield Finding(
                topic="running",
                verdict="warning",
                what=f"{printable(str(each.path))} is not a status file: {printable(each.why)}",
                fix="Remove it.",
            )


def _device(found: dict[str, Any]) -> str:
    granularity = format_bytes(found["granularity"])
    free = format_bytes(found["free_bytes"])
    if found["driver"] == "host":
        return f"{found['device']}: {free} free, granularity {granularity}, torch {found['torch']}"
    version = found["driver_version"]
    return (
        f"{found['device']}: {found['name']}, {free} of {format_bytes(found['total_bytes'])} free, "
        f"granularity {granularity}, driver for CUDA {version // 1000}.{version % 1000 // 10}, "
        f"torch {found['torch']}"
    )


def _handles(types: dict[str, str]) -> Finding:
    answers = {name: said if said == "works" else f"no ({said})" for name, said in types.items()}
    tried = ", ".join(f"{name} {said}" for name, said in answers.items())
    works = [name for name, said in types.items() if said == "works" and name != "fabric"]
    return Finding(
        topic="device",
        verdict="ok" if works else "broken",
        what=f"handles tried: {tried}",
        fix="" if works else "No handle can be shared: the driver is too old, or a sandbox forbids it.",
        data={"handle_types": types},
    )


def _descriptors(driver: str) -> Iterator[Finding]:
    """A warning where a pool that grows in steps may run out of file descriptors; this process's limit."""
    limits = descriptor_limits()
    needed = descriptors_needed(driver, _HANDLES)
    if limits.left is not None and limits.left < needed:
        yield Finding(
            topic="device",
            verdict="warning",
            what=f"{limits.left} of {limits.soft} file descriptors (RLIMIT_NOFILE) are left; a pool of "
            f"{_HANDLES} handles, one for each growth, may need {needed}",
            fix="Raise the limit where the server starts (`ulimit -n`, LimitNOFILE=, --ulimit nofile=), "
            "or grow in fewer and larger steps.",
            data={"soft": limits.soft, "hard": limits.hard, "left": limits.left, "needed": needed},
        )


def _swap(found: dict[str, Any]) -> Finding:
    size, took = format_bytes(found["swapped_bytes"]), found["swap_ms"]
    if found["swapped_in_place"]:
        what = f"a sink was swapped for {size} at the same address in {took:.1f} ms"
        return Finding(topic="device", verdict="ok", what=what)
    return Finding(
        topic="device",
        verdict="broken",
        what=f"after a swap of the sink for {size}, the address did not show the new memory",
        fix="Report it with this output: captured graphs would read the wrong bytes.",
    )


def _torch_cache(found: dict[str, Any]) -> Finding:
    released, left = found["torch_cache_released"], found["torch_cache_left"]
    what = f"torch kept {format_bytes(released)} of freed memory in its cache, which was released"
    if left:
        return Finding(
            topic="device",
            verdict="warning",
            what=f"{what} but for {format_bytes(left)}: the pool will be smaller by that",
            fix="Look for a private pool (CUDA graphs, PYTORCH_CUDA_ALLOC_CONF) that holds it.",
        )
    return Finding(topic="device", verdict="ok", what=f"{what}, as before every measurement")


def _rdma(found: dict[str, Any]) -> Finding:
    cards = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    named = f"network cards: {', '.join(cards)}" if cards else "no RDMA network card here"
    if found["rdma_capable"]:
        return Finding(
            topic="device", verdict="ok", what=f"handles are made for RDMA (gpuDirectRDMACapable); {named}"
        )
    return Finding(
        topic="device",
        verdict="warning" if cards else "note",
        what=f"this device cannot make handles for RDMA; {named}",
        fix="Transfers over the network will go through host memory." if cards else "",
    )
