"""Attaching to SGLang: choose a family, register its hooks, and prove that SGLang has applied them."""

from __future__ import annotations

import importlib.metadata
import logging
import os

from kvarena.plugin.engines.sglang import families
from kvarena.plugin.engines.sglang.applied import REGISTRY, handler_of
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.families.targets import HookKind, Support
from kvarena.plugin.engines.sglang.runtime import runtime

__all__ = [
    "ENTRY_POINT",
    "attach",
    "release_of_sglang",
]

logger = logging.getLogger("kvarena.sglang")

ENTRY_POINT = "kvarena"
#: Looked into to prove that the hooks stand, and nobody else's.
_REGISTRY_NEEDS = ("HookRegistry.register", "HookRegistry._hooks", "HookRegistry._patched", "HookType.AROUND")


def attach() -> bool:
    """Register kvarena's hooks with SGLang, if the settings ask for it and the release has the shapes.

    Returns
    -------
    bool
        Whether hooks were registered. Whether they may act is decided later, when SGLang has applied
        them: see `applied.application_problems`.
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
    runtime.family, runtime.support = choice.family, choice.support
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


def _registry_differences() -> list[str]:
    found = []
    for name in _REGISTRY_NEEDS:
        try:
            resolve(f"{REGISTRY}.{name}")
        except LookupError as error:
            found.append(str(error))
    return found


def _register(choice: families.Choice) -> None:
    registry = resolve(f"{REGISTRY}.HookRegistry")
    around = resolve(f"{REGISTRY}.HookType").AROUND
    for target in choice.targets():
        handler = handler_of(target)
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


def refused_by_environment(environ: dict[str, str] | None = None) -> str | None:
    """Why SGLang would not even call kvarena; for ``kvarena doctor``, since then no code of ours runs."""
    environ = dict(os.environ) if environ is None else environ
    listed = environ.get("SGLANG_PLUGINS", "")
    # Only an empty variable allows all: one of blanks and commas is a list of nobody.
    if listed and ENTRY_POINT not in (name.strip() for name in listed.split(",")):
        return f"SGLANG_PLUGINS={listed} leaves kvarena out; add {ENTRY_POINT} to it"
    return None
