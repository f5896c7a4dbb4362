"""The built-in answers to the hooks: drivers, refusals and the budget."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, final

from kvarena.errors import KvArenaError
from kvarena.hooks._markers import hookimpl

if TYPE_CHECKING:
    import torch
    from kvarena.hooks.requests import BudgetRequest, TransferConfig
    from kvarena.pool import Arena, Driver, Refusal, SizingRequest
    from kvarena.transfer import TransferEngine

__all__ = ["DefaultBudget", "DefaultDrivers", "DefaultEngines", "DefaultRefusals"]


@final
class DefaultDrivers:
    """CUDA's virtual memory for ``cuda`` devices, memfd handles for ``cpu``.

    Parameters
    ----------
    memory_limit : int, optional
        Bytes that the host driver may take in all; None: what the machine has.
    """

    plugin_name = "kvarena-drivers"

    def __init__(self, memory_limit: int | None = None) -> None:
        self._memory_limit = memory_limit

    @hookimpl(trylast=True)
    def kvarena_driver(self, device: torch.device) -> Driver | None:
        """Answer for the two device types that kvarena knows."""
        # Each imports what only its device needs.
        if device.type == "cuda":
            from kvarena.pool.cuda_vmm import CudaVmm

            return CudaVmm(device)
        if device.type == "cpu":
            from kvarena.pool.host_vmm import HostVmm

            return HostVmm(memory_limit=self._memory_limit)
        return None


@final
class DefaultRefusals:
    """The planner's own reasons."""

    plugin_name = "kvarena-refusals"

    @hookimpl(trylast=True)
    def kvarena_refusals(self, request: SizingRequest) -> Iterable[Refusal]:
        """Every built-in reason at once."""
        from kvarena.pool import post_capture_kv_sizing_planned

        return post_capture_kv_sizing_planned(request).refusals


@final
class DefaultBudget:
    """Free memory as measured now, less the headroom."""

    plugin_name = "kvarena-budget"

    @hookimpl(trylast=True)
    def kvarena_budget(self, request: BudgetRequest) -> int:
        """Bytes for the pool, never more than its reservation."""
        # The swap at finalize makes the new handle while the sink's is still there (so that it can be
        # taken back), so the sink's bytes, one granule or a few, are not counted as free.
        limit = request.driver.free_bytes() - request.headroom_bytes
        if request.max_bytes is not None:
            limit = min(limit, request.max_bytes)
        # Whole granules are backed, so a limit between two of them is rounded down.
        granularity = request.driver.granularity
        return max(0, min(limit // granularity * granularity, request.pool.reserved_bytes))


@final
class DefaultEngines:
    """The transfer engines that kvarena ships, by name."""

    plugin_name = "kvarena-engines"

    @hookimpl(trylast=True)
    def kvarena_transfer_engines(self, config: TransferConfig) -> list[TransferEngine]:
        """Make those of the configured engines that are ours."""
        engines: list[TransferEngine] = []
        try:
            for name in config.engines:
                make = _ENGINES.get(name)
                if make is not None:
                    engines.append(make(config))
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        return engines


def _mooncake(config: TransferConfig) -> TransferEngine:
    from kvarena.transfer.mooncake.engine import MooncakeEngine

    return MooncakeEngine(config.hostname, timeout=config.timeout_s)


def _nixl(config: TransferConfig) -> TransferEngine:
    from kvarena.transfer.nixl.engine import NixlEngine

    device = _arena(config).driver.device
    if device.type != "cuda":
        return NixlEngine(timeout=config.timeout_s)
    fabric = bool(getattr(_arena(config).driver, "fabric_capable", False))
    return NixlEngine(
        memory="VRAM", device_id=device.index or 0, vmm=True, fabric=fabric, timeout=config.timeout_s
    )


def _same_host(config: TransferConfig) -> TransferEngine:
    from kvarena.transfer.same_host.engine import SameHostEngine

    directory = None if config.socket_dir is None else Path(config.socket_dir)
    return SameHostEngine(
        _arena(config),
        directory=directory,
        connect_timeout=config.timeout_s,
        drain_timeout=config.timeout_s,
    )


def _arena(config: TransferConfig) -> Arena:
    if config.arena is None:
        raise KvArenaError(
            f"the transfer engines {', '.join(config.engines)} need an arena.",
            fix="Pass TransferConfig(arena=pool.arena).",
        )
    return config.arena


# Each imports what only its engine needs.
_ENGINES = {"mooncake": _mooncake, "nixl": _nixl, "same-host": _same_host}
