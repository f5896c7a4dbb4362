"""SGLang: its release, whether kvarena's hooks fit it, and whether a configuration would be refused."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from kvarena.plugin.commands.doctor.child import Child, ChildFailed
from kvarena.plugin.commands.doctor.findings import Finding
from kvarena.plugin.config import Settings

__all__ = ["examine_sglang"]

# Importing SGLang takes several seconds, and resolving arguments may fetch a model's configuration.
_TIMEOUT_S = 180.0
_SUPPORT = {
    "planner_only": "its planner is corrected; nothing is sized after capture",
    "backport": "sizing after capture is brought to it",
    "native": "its own sizing after capture is made safe",
}


def examine_sglang(settings: Settings, arguments: str | None) -> Iterator[Finding]:
    """Everything about the installed SGLang.

    Parameters
    ----------
    settings : Settings
        The operator's.
    arguments : str or None
        What the server would be launched with; None: only the installation is looked at.
    """
    if _version() is None:
        yield Finding(
            topic="sglang",
            verdict="note" if arguments is None else "broken",
            what="SGLang is not installed"
            + ("" if arguments is None else ", so its arguments cannot be judged"),
            fix="" if arguments is None else "pip install 'kvarena[sglang]', or run this in SGLang's image.",
        )
        return
    with Child("sglang_probe", [] if arguments is None else [arguments]) as child:
        try:
            found = child.answer(_TIMEOUT_S)
            yield from _installation(found, enabled=settings.enable, judged=arguments is not None)
            if arguments is not None and not found["problems"]:
                yield from _configuration(child.answer(_TIMEOUT_S)["refusals"])
        except ChildFailed as failure:
            yield Finding(topic="sglang", verdict="broken", what=f"SGLang {_version()}: {failure}")


def _installation(found: dict[str, Any], *, enabled: bool, judged: bool) -> Iterator[Finding]:
    release = found["release"]
    for problem in found["problems"]:
        yield Finding(
            topic="sglang",
            verdict="refused",
            what=f"SGLang {release} runs unmodified: {problem}",
            fix="Use a supported release (0.5.20 to 0.5.23).",
        )
    if not found["problems"]:
        targets = len(found["targets"])
        fit = f"all {targets} hook targets fit" if targets > 1 else "the hook target fits"
        yield Finding(
            topic="sglang",
            verdict="ok",
            what=f"SGLang {release}: {fit}; {_SUPPORT[found['support']]}",
            data=found,
        )
        yield from _untested(found)
    if not enabled:
        yield Finding(
            topic="sglang",
            verdict="refused" if judged else "note",
            what="KVARENA_ENABLE is not set: SGLang runs unmodified",
            fix="Set KVARENA_ENABLE=1 in the server's environment." if judged else "",
            data={"code": "disabled", "setting": "KVARENA_ENABLE"},
        )


def _untested(found: dict[str, Any]) -> Iterator[Finding]:
    """What nobody has tested in a release that is served all the same."""
    if found["untested"]:
        yield Finding(
            topic="sglang",
            verdict="note",
            what=found["untested"],
            fix="Try it with your own load first, or use a release that was tested (0.5.20 to 0.5.23).",
            data={"code": "untested"},
        )
    for difference in found["unfit"]:
        yield Finding(
            topic="sglang",
            verdict="refused",
            what=f"transfers that need it are refused: {difference}",
            fix="Use a release that was tested (0.5.20 to 0.5.23) for prefill and decode servers.",
            data={"code": "transfer_target", "setting": "--disaggregation-mode"},
        )


def _configuration(reasons: list[dict[str, str]]) -> Iterator[Finding]:
    from kvarena.plugin.commands.doctor.configuration import refusals
    from kvarena.pool.refusals import Refusal

    yield from refusals("SGLang", [Refusal(**each) for each in reasons])


def _version() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
