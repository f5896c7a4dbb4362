"""The plugin manager: pluggy's, with failures that carry the plugin's name."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import pluggy
from kvarena.errors import KvArenaError
from kvarena.hooks import specs
from kvarena.hooks._answers import checked_answer
from kvarena.hooks._markers import PROJECT
from kvarena.hooks.errors import HookError, PluginLoadError

__all__ = ["HookManager", "create_manager"]


@final
class HookManager(pluggy.PluginManager):
    """pluggy's manager for the hooks of :mod:`kvarena.hooks.specs`.

    An exception of a plugin, or an answer of the wrong type, leaves a call as `HookError`, which names
    the plugin; kvarena's own errors pass unchanged, because their types are what callers act on.
    """

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(specs)

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Register a plugin; a hook with an unknown name or argument is refused with the plugin's name."""
        try:
            registered = super().register(plugin, name)
            self.check_pending()
        except ValueError as error:
            # The name is taken, or the plugin is registered already: whoever has it keeps it.
            raise PluginLoadError(name or self.get_canonical_name(plugin), error) from error
        except pluggy.PluginValidationError as error:
            refused = name or self.get_canonical_name(plugin)
            # Some releases of pluggy have taken it out again already.
            if self.is_registered(plugin):
                self.unregister(plugin)
            raise PluginLoadError(refused, error) from error
        return registered

    def _hookexec(
        self,
        hook_name: str,
        methods: Sequence[pluggy.HookImpl],
        kwargs: Mapping[str, object],
        firstresult: bool,
    ) -> Any:
        # Every call of every hook goes through here: the place where a failure gets its plugin's name.
        named = [_named_impl(hook_name, impl) for impl in methods]
        return super()._hookexec(hook_name, named, kwargs, firstresult)

    def load_entry_points(self, group: str = PROJECT) -> list[str]:
        """Load the installed plugins of the entry-point group, in the order of their names.

        Returns
        -------
        list of str
            The names that were registered.

        Raises
        ------
        PluginLoadError
            One cannot be imported, or its hooks do not fit the specs.
        """
        loaded = []
        for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda entry: entry.name):
            if self.is_blocked(entry.name) or self.has_plugin(entry.name):
                continue
            try:
                plugin = entry.load()
            except Exception as error:
                raise PluginLoadError(entry.name, error) from error
            if self.register(plugin, entry.name) is not None:
                loaded.append(entry.name)
        return loaded

    def call_every(self, hook: str, **kwargs: Any) -> list[KvArenaError]:
        """Call a hook in every plugin, also after one has failed, and return the failures.

        For the moments when everyone must hear, such as a pool's closing.
        """
        failures: list[KvArenaError] = []
        everyone = self.get_plugins()
        # The order of a plain call: last registered first.
        implementations = getattr(self.hook, hook).get_hookimpls()
        for plugin in [impl.plugin for impl in reversed(implementations)]:
            try:
                self.subset_hook_caller(hook, everyone - {plugin})(**kwargs)
            except KvArenaError as error:
                failures.append(error)
            except Exception as error:  # noqa: BLE001 - of pluggy itself: a wrapper that never yields
                failures.append(HookError(self.get_name(plugin) or repr(plugin), hook, error))
        return failures

    def one_by_one(self, hook: str) -> Iterator[Callable[..., Any]]:
        """A caller of a hook for each plugin, in the order of a plain call; wrappers are around each.

        For hooks whose answers must not be lost when a later plugin fails.
        """
        implementations = getattr(self.hook, hook).get_hookimpls()
        answering = [impl.plugin for impl in implementations if not (impl.hookwrapper or impl.wrapper)]
        for plugin in reversed(answering):
            yield self.subset_hook_caller(hook, set(answering) - {plugin})


def create_manager(
    plugins: Iterable[object] = (), *, entry_points: bool = True, block: Iterable[str] = ()
) -> HookManager:
    """Make a manager with the built-in defaults given, then third parties.

    Parameters
    ----------
    plugins : iterable of object
        Registered first, so that whatever is installed can answer before them.
    entry_points : bool
        Whether to load the distributions of the entry-point group ``kvarena``.
    block : iterable of str
        Names that are never registered.
    """
    manager = HookManager()
    for name in block:
        manager.set_blocked(name)
    for plugin in plugins:
        manager.register(plugin, getattr(plugin, "plugin_name", None))
    if entry_points:
        manager.load_entry_points()
    return manager


def _named_impl(hook: str, impl: pluggy.HookImpl) -> pluggy.HookImpl:
    named = _named_wrapper if impl.hookwrapper or impl.wrapper else _named
    function = named(impl.function, impl.plugin_name, hook)
    return pluggy.HookImpl(impl.plugin, impl.plugin_name, function, impl.opts)


def _named(function: Callable[..., object], plugin: str, hook: str) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object) -> object:
        with _failures_of(plugin, hook):
            return checked_answer(hook, function(*args))

    return call


def _named_wrapper(
    function: Callable[..., Any], plugin: str, hook: str
) -> Callable[..., Generator[object, object, object]]:
    @functools.wraps(function)
    def call(*args: object) -> Generator[object, object, object]:
        with _failures_of(plugin, hook):
            return (yield from function(*args))

    return call


@contextlib.contextmanager
def _failures_of(plugin: str, hook: str) -> Iterator[None]:
    try:
        yield
    except KvArenaError:
        raise
    except Exception as error:
        raise HookError(plugin, hook, error) from error
