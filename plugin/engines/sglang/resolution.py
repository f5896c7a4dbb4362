"""What the planner says while arguments are resolved must still be true when they are."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any, final

from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.measure.unmodified import keeps_fraction
from kvarena.plugin.engines.sglang.runtime import runtime

__all__ = ["Resolution", "current_resolution", "resolve_arguments"]


@final
class Resolution:
    """One pass over a server's arguments."""

    def __init__(self, answer: bool | None = None) -> None:
        self.answer = answer
        """What the planner has to say, because it is known by now; None: it decides."""
        self.asked = False
        """Whether SGLang asked its planner at all."""
        self.promised = False
        """Whether it said yes, for which SGLang gave the memory reserve away."""


current_resolution: contextvars.ContextVar[Resolution | None] = contextvars.ContextVar(
    "kvarena_resolution", default=None
)


def resolve_arguments(original: Callable[[Any], None], server_args: Any) -> None:
    """Around the function that resolves a server's arguments.

    Since 0.5.20 the planner says no meanwhile, and what is sized later is decided when the pool is built.
    Before, SGLang asks its planner in the middle, and goes on to change what the answer was made from:
    attention backends that cannot be captured end prefill graphs, for one. The pool would then be sized
    before capture, with a reserve that is gone. Where that happens, the arguments are resolved once more
    from what they were, with the answer that is known now.
    """
    if not (runtime.acts() and server_args.enable_unified_memory):
        original(server_args)
        return
    assert runtime.family is not None
    if keeps_fraction(runtime.family):
        # Nothing is promised that might have to be taken back: the fraction stays what it is without us.
        only = Resolution(answer=False)
        _pass(original, server_args, only)
        if only.asked:
            resolve(runtime.family.planner.path)(server_args)  # says why not, where it says no
        return
    try:
        before = deepcopy(vars(server_args))
    except Exception:  # noqa: BLE001 - whatever an embedding program has put there
        _pass(original, server_args, Resolution(answer=False))
        return
    first = Resolution()
    _pass(original, server_args, first)
    if first.promised and not resolve(runtime.family.planner.path)(server_args):
        runtime.log_once(
            logging.INFO,
            "kvarena: SGLang's arguments are resolved again, with the memory reserve that the pool needs.",
        )
        # Not by assignment: SGLang seals its arguments meanwhile.
        vars(server_args).clear()
        vars(server_args).update(before)
        _pass(original, server_args, Resolution(answer=False))


def _pass(original: Callable[[Any], None], server_args: Any, resolution: Resolution) -> None:
    token = current_resolution.set(resolution)
    try:
        original(server_args)
    finally:
        current_resolution.reset(token)
