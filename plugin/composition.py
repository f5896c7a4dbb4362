"""The manager, the refusals and the transfer engines that a process's settings ask for."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvarena.hooks import HookManager, TransferConfig, create_manager
from kvarena.hooks.defaults import DefaultBudget, DefaultDrivers, DefaultEngines, DefaultRefusals
from kvarena.plugin.config import ConfigError, Settings

if TYPE_CHECKING:
    from kvarena.plugin.announcements import Observer
    from kvarena.pool import Arena, Refusal, SizingRequest
    from kvarena.transfer import TransferEngine

__all__ = ["collect_refusals", "make_engines", "make_manager", "make_observer"]


def make_manager(settings: Settings) -> HookManager:
    """The manager that `settings` ask for: the built-in answers, then the installed plugins."""
    defaults = (DefaultDrivers(settings.memory_limit), DefaultRefusals(), DefaultBudget(), DefaultEngines())
    return create_manager(defaults, entry_points=settings.load_plugins, block=settings.block_plugins)


def collect_refusals(manager: HookManager, request: SizingRequest) -> tuple[Refusal, ...]:
    """Every plugin's reasons, each once."""
    answers = manager.hook.kvarena_refusals(request=request)
    return tuple(dict.fromkeys(refusal for answer in answers for refusal in answer or ()))


def make_observer(settings: Settings, name: str = "") -> Observer:
    """Who watches a pool's life: its timeline, the status file and the metrics that `settings` ask for.

    Raises
    ------
    MetricsPortError
        ``metrics_port`` is taken.
    """
    from kvarena.plugin.observe.observation import Observation

    return Observation(settings, name=name)


def make_engines(manager: HookManager, settings: Settings, arena: Arena) -> list[TransferEngine]:
    """The transfer engines that should know a pool over `arena`.

    Raises
    ------
    ConfigError
        No plugin has one of the names that the settings ask for.
    KvArenaError
        A plugin failed. In both cases no engine is left open.
    """
    config = TransferConfig(
        engines=settings.transfer,
        hostname=settings.transfer_host,
        timeout_s=settings.transfer_timeout,
        socket_dir=settings.socket_dir,
        arena=arena,
    )
    engines: list[TransferEngine] = []
    with ExitStack() as undo:
        for ask in manager.one_by_one("kvarena_transfer_engines"):
            for answer in ask(config=config):
                for engine in answer or ():
                    undo.callback(engine.close)
                    engines.append(engine)
        missing = set(settings.transfer) - {engine.name for engine in engines}
        if missing:
            fix = (
                "Set KVARENA_TRANSFER (or --transfer) to mooncake, nixl or same-host, or install the plugin "
                "that has it."
            )
            if not settings.load_plugins:
                fix += " KVARENA_LOAD_PLUGINS=0 loads none that is installed."
            elif settings.block_plugins:
                fix += f" KVARENA_BLOCK_PLUGINS leaves out {', '.join(settings.block_plugins)}."
            raise ConfigError(
                f"no plugin provides the transfer engine {', '.join(sorted(missing))}.", fix=fix
            )
        undo.pop_all()
    return engines
