"""The size that the unmodified release would have taken, known before capture; more addresses than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarena.plugin.engines.sglang.families.targets import Family
from kvarena.plugin.engines.sglang.runtime import runtime

__all__ = ["fraction_is_given", "keeps_fraction", "profile_available_bytes"]

_GIB = 1 << 30
HANDLER = "measure.unmodified:profile_available_bytes"


def keeps_fraction(family: Family) -> bool:
    """Whether SGLang's memory fraction stays what it is without us (0.5.20 and later).

    Before, the planner's promise raises it while arguments are resolved, and what was raised is not told
    from what an operator gave.
    """
    return any(target.handler == HANDLER for target in family.targets)


def fraction_is_given(server_args: Any) -> bool:
    """Whether the operator gave ``--mem-fraction-static``: the arguments keep what was given."""
    return getattr(server_args, "mem_fraction_static", None) is not None


def profile_available_bytes(original: Callable[..., int], self: Any, pre_model_load_memory: float) -> int:
    """Around ``KVCacheConfigurator._profile_available_bytes``: remember stock's size, and reserve more.

    The addresses of what SGLang keeps free for graphs and activations are reserved, too, but for the
    smallest reserve that any measurement can end with; how many of them get memory is decided after capture.
    """
    available = int(original(self, pre_model_load_memory))
    if self.is_draft_worker or not (runtime.acts() and runtime.planned and self.post_capture_kv_active):
        return available
    runtime.unmodified_bytes = available
    if fraction_is_given(self.server_args):
        return available
    from sglang.srt.runtime_context import get_schedule

    slack_gib = pre_model_load_memory * (1 - get_schedule().mem_fraction_static)
    return available + max(0, int(slack_gib * _GIB) - floor_bytes(self.server_args))


def floor_bytes(server_args: Any) -> int:
    """The least that stays free: as SGLang's where it sizes after capture, 1.5 GiB and 1/8 GiB a rank."""
    ranks = int(server_args.tp_size) * int(server_args.pp_size)
    return 1536 * (1 << 20) + ranks * (_GIB >> 3)
