"""Whether SGLang has applied the hooks that were registered, and nobody else has changed the same places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.families.targets import HookKind, Target

if TYPE_CHECKING:
    from kvarena.plugin.engines.sglang.families import Choice

__all__ = ["REGISTRY", "application_problems", "handler_of", "handlers_of"]

REGISTRY = "sglang.srt.plugins.hook_registry"


def application_problems(choice: Choice) -> list[str]:
    """Why the hooks may not act, one line each.

    SGLang logs and swallows what goes wrong while it applies hooks, so that a plugin can be half
    applied; and several plugins may hook one target, where the last one wins.
    """
    registry = resolve(f"{REGISTRY}.HookRegistry")
    found = []
    for target in choice.targets():
        others = _other_plugins(registry, target)
        try:
            problem = _problem_of(registry, target)
        except LookupError as error:
            problem = str(error)  # whoever replaced its class left it out
        # Somebody else's hook is the cause of whatever else is wrong there.
        found += others or ([problem] if problem else [])
    return list(dict.fromkeys(found))


def handlers_of(function: Any) -> Iterator[Any]:
    """The hooks inside SGLang's wrappers: each is in its wrapper's closure, the original in __wrapped__."""
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)


def _other_plugins(registry: Any, target: Target) -> list[str]:
    """Hooks of others on a target or on the class that it belongs to, by whichever name they know it."""
    handler, found = handler_of(target), []
    for path, hooks in list(registry._hooks.items()):
        sources = [source for _, hook, source in hooks if hook is not handler]
        if sources and _is_same(path, target, handler):
            names = ", ".join(sorted({_plugin_name(source) for source in sources}))
            found.append(f"{path} is hooked by another plugin too ({names})")
    return found


def _is_same(path: str, target: Target, handler: Any) -> bool:
    """Whether a path leads to a target or its class: modules hand on what they import from others.

    SGLang's wrapper of a replaced function still names it as ``__wrapped__``, so that ours is found behind
    it although nobody calls it any more.
    """
    owner = target.path.rpartition(".")[0]
    if path in (target.path, owner):
        return True
    if path.rpartition(".")[2] not in (target.path.rpartition(".")[2], owner.rpartition(".")[2]):
        return False
    try:
        value = resolve(path)
        return value is resolve(owner) or value is handler or handler in handlers_of(value)
    except LookupError:
        return False


def _problem_of(registry: Any, target: Target) -> str:
    handler = handler_of(target)
    if target.kind is HookKind.PROPERTY:
        stands = resolve(target.path) is handler
        return "" if stands else f"{target.path} was not replaced, or somebody replaced it again"
    if target.path not in registry._patched:
        return f"the hook on {target.path} was not applied"
    if handler not in handlers_of(resolve(target.path)):
        return f"the hook on {target.path} was applied, but something replaced it"
    return ""


def handler_of(target: Target) -> Any:
    return resolve(f"kvarena.plugin.engines.sglang.{target.handler}")


def _plugin_name(source: Any) -> str:
    return str(getattr(source, "plugin_name", None) or "unnamed")
