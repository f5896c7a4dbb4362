"""What others can attach to: the hook specifications, the manager and the built-in defaults."""

from __future__ import annotations

from kvarena.hooks._markers import hookimpl, hookspec
from kvarena.hooks.errors import HookError, PluginLoadError
from kvarena.hooks.manager import HookManager, create_manager
from kvarena.hooks.requests import BudgetRequest, TransferConfig

__all__ = [
    "BudgetRequest",
    "HookError",
    "HookManager",
    "PluginLoadError",
    "TransferConfig",
    "create_manager",
    "hookimpl",
    "hookspec",
]
