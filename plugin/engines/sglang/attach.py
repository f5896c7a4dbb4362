"""Attaching to SGLang: choose a family, register its hooks, and prove that SGLang has applied them."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Iterator
from typing import Any

from kvarena.plugin.engines.sglang import families
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.families.targets import HookKind, Support, Target
from kvarena.plugin.engines.sglang.runtime import runtime

__all__ = [
    "ENTRY_POINT",
    "application_problems",
    "attach",
    "handlers_of",
    "release_of_sglang",
]

logger = logging.getLogger("kvarena.sglang")

ENTRY_POINT = "kvarena"
_REGISTRY = "sglang.srt.plugins.hook_registry"
#: Looked into to prove that the hooks stand, and nobody else's.
_REGISTRY_NEEDS = ("HookRegistry.register", "HookRegistry._hooks", "HookRegistry._patched", "HookType.AROUND")


def attach() -> bool:
    """Register kvarena's hooks with SGLang, if the settings ask for it and the release has the shapes.

    Returns
    -------
    bool
        Whether hooks were registered. Whether they may act is decided later, when SGLang has applied
        them: see `application_problems`.
    """
    from kvarena.plugin.config import load_settings

    if runtime.attached:
        return True
    settings = load_settings()
    if not settings.enable:
        return False
    release = release_of_sglang()
    if release is None:
        logger.warning("kvarena: KVARENA_ENABLE is set but SGLang is not installed; nothing is done.")
        return False
    choice = families.choose(release, experimental=settings.sglang_experimental)
    reasons = [*choice.reasons, *_registry_differences()]
    if choice.family is None or choice.support is None or reasons:
        logger.warning(
            "kvarena: SGLang %s is not supported and runs unmodified; what differs: %s.",
            release,
            "; ".join(reasons),
        )
        return False
    runtime.settings, runtime.choice, runtime.release = settings, choice, release
    runtime.family, runtime.layer = choice.family, choice.support
    _register(choice)
    runtime.attached = True
    if choice.untested:
        logger.warning("kvarena: %s.", choice.untested)
    logger.info(
        "kvarena: attached to SGLang %s (%s, %s).", release, choice.family.name, choice.support.name.lower()
    )
    return True


def release_of_sglang() -> str | None:
    """The installed release, without a local or development suffix; None: there is none."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version.partition("+")[0]


def application_problems(choice: families.Choice) -> list[str]:
    """Why the hooks may not act, one line each.

    SGLang logs and swallows what goes wrong while it applies hooks, so that a plugin can be half
    applied; and several plugins may hook one target, where the last one wins.
    """
    registry = resolve(f"{_REGISTRY}.HookRegistry")
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


def _other_plugins(registry: Any, target: Target) -> list[str]:
    """Hooks of others on a target or on the class that it belongs to, by whichever name they know it."""
    handler, found = _handler(target), []
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
    handler = _handler(target)
    if target.kind is HookKind.PROPERTY:
        stands = resolve(target.path) is handler
        return "" if stands else f"{target.path} was not replaced, or somebody replaced it again"
    if target.path not in registry._patched:
        return f"the hook on {target.path} was not applied"
    if handler not in handlers_of(resolve(target.path)):
        return f"the hook on {target.path} was applied, but something replaced it"
    return ""


def _registry_differences() -> list[str]:
    found = []
    for name in _REGISTRY_NEEDS:
        try:
            resolve(f"{_REGISTRY}.{name}")
        except LookupError as error:
            found.append(str(error))
    return found


def _register(choice: families.Choice) -> None:
    registry = resolve(f"{_REGISTRY}.HookRegistry")
    around = resolve(f"{_REGISTRY}.HookType").AROUND
    for target in choice.targets():
        handler = _handler(target)
        if target.kind is HookKind.PROPERTY:
            owner, _, name = target.path.rpartition(".")
            setattr(resolve(owner), name, handler)
        elif not any(hook is handler for _, hook, _ in registry._hooks.get(target.path, ())):
            registry.register(target.path, handler, around)
    if (
        choice.support is not Support.PLANNER_ONLY
        and runtime.settings is not None
        and runtime.settings.same_host
    ):
        from kvarena.plugin.engines.sglang.same_host.mooncake_hooks import register_hooks

        register_hooks(registry, around)


def _handler(target: Target) -> Any:
    return resolve(f"kvarena.plugin.engines.sglang.{target.handler}")


def handlers_of(function: Any) -> Iterator[Any]:
    """The hooks inside SGLang's wrappers: each is in its wrapper's closure, the original in __wrapped__."""
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)


def _plugin_name(source: Any) -> str:
    return str(getattr(source, "plugin_name", None) or "unnamed")


def refused_by_environment(environ: dict[str, str] | None = None) -> str | None:
    """Why SGLang would not even call kvarena; for ``kvarena doctor``, since then no code of ours runs."""
    environ = dict(os.environ) if environ is None else environ
    listed = environ.get("SGLANG_PLUGINS", "")
    # Only an empty variable allows all: one of blanks and commas is a list of nobody.
    if listed and ENTRY_POINT not in (name.strip() for name in listed.split(",")):
        return f"SGLANG_PLUGINS={listed} leaves kvarena out; add {ENTRY_POINT} to it"
    return None
