"""A child that looks at the installed SGLang: its release, kvarena's targets in it, and a configuration."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import shlex
from collections.abc import Sequence
from typing import Any

from kvarena.errors import KvArenaError
from kvarena.plugin.commands.doctor.child import emit, take_stdout

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """``[SGLANG ARGUMENTS]``, as one text: answers the installation, then the reasons against them."""
    take_stdout()
    # What kvarena would do is asked as if it were on; whether it is, the parent says.
    os.environ["KVARENA_ENABLE"] = "1"
    try:
        found = _installation()
        emit(found)
        if found["release"] is not None and arguments and not found["problems"]:
            emit({"refusals": _refusals(arguments[0])})
    except KvArenaError as error:
        emit({"error": str(error)})
    return 0


def _installation() -> dict[str, Any]:
    from kvarena.plugin.engines.sglang import attach, families

    release = attach.release_of_sglang()
    found: dict[str, Any] = {"release": release, "problems": [], "targets": []}
    if release is None:
        return found
    from kvarena.plugin.config import load_settings

    experimental = load_settings().sglang_experimental
    choice = families.choose(release, experimental=experimental)
    excluded = attach.refused_by_environment()
    found["problems"] = [*([excluded] if excluded else []), *choice.reasons]
    if choice.family is not None and choice.support is not None:
        found |= {
            "family": choice.family.name,
            "support": choice.support.name.lower(),
            "targets": [target.path for target in choice.targets()],
            "untested": choice.untested,
            "unfit": list(choice.unfit.values()),
        }
    return found


def _refusals(arguments: str) -> list[dict[str, str]]:
    """Let SGLang read the arguments, with kvarena's hooks in place, and ask kvarena's planner."""
    from kvarena.plugin.engines.sglang.families.shapes import resolve
    from kvarena.plugin.engines.sglang.planner import refusals_of
    from kvarena.plugin.engines.sglang.runtime import runtime

    resolve("sglang.srt.plugins.load_plugins")()
    family = runtime.family
    if family is None:
        raise KvArenaError("SGLang did not load kvarena's plugin.", fix="See its log for the reason.")
    server_args = _parsed(arguments)
    original = inspect.unwrap(resolve(family.planner.path))
    return [
        {"code": each.code, "setting": each.setting, "reason": each.reason}
        for each in refusals_of(original, server_args)
    ]


def _parsed(arguments: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            server_args = prepare_server_args(shlex.split(arguments))
            # Construction resolved them itself up to 0.5.19.
            resolve_once = getattr(server_args, "resolve_once", None)
            if resolve_once is not None:
                resolve_once()
            return server_args
    except SystemExit as error:
        last = said.getvalue().strip().splitlines()[-1:] or [f"it ended with status {error}"]
        raise KvArenaError(f"it does not take these arguments: {last[0].rstrip('.')}.") from error
    except Exception as error:
        raise KvArenaError(
            f"it cannot resolve these arguments here: {type(error).__name__}: {str(error).rstrip('.')}.",
            fix="Run the doctor where the server would run.",
        ) from error
