"""Errors of the hook system."""

from __future__ import annotations

from kvarena.errors import KvArenaError
from kvarena.errors.shortage import describe_shortage

__all__ = ["HookError", "PluginLoadError"]


class HookError(KvArenaError):
    """A plugin's hook raised something that is not kvarena's own error.

    Attributes
    ----------
    plugin, hook : str
        Who failed, and in what.
    """

    def __init__(self, plugin: str, hook: str, error: BaseException) -> None:
        super().__init__(
            f"plugin {plugin!r} failed in {hook}: {type(error).__name__}: {error}.",
            fix=describe_shortage(error) or _advice(plugin),
        )
        self.plugin = plugin
        self.hook = hook


class PluginLoadError(KvArenaError):
    """A distribution's entry point in the group ``kvarena`` cannot be used."""

    def __init__(self, plugin: str, error: BaseException) -> None:
        super().__init__(
            f"plugin {plugin!r} of the entry-point group 'kvarena' cannot be loaded: "
            f"{type(error).__name__}: {error}.",
            fix=describe_shortage(error) or _advice(plugin),
        )
        self.plugin = plugin


def _advice(plugin: str) -> str:
    if plugin.startswith("kvarena-"):  # a built-in answer: nothing that an operator could do without
        return "This is a fault of kvarena itself: please report it."
    return f"Fix or uninstall the plugin, or name it in KVARENA_BLOCK_PLUGINS={plugin}."
