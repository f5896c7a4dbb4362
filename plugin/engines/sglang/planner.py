"""The planner's hook: stock's answer, made true, and every reason against ours."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvarena.errors import KvArenaError
from kvarena.plugin.engines.sglang.families.choice import is_experimental
from kvarena.plugin.engines.sglang.families.targets import Support, Use
from kvarena.plugin.engines.sglang.request import ENVIRONMENT, config_view, own_refusals, request_from
from kvarena.plugin.engines.sglang.resolution import current_resolution
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.pool import Refusal

__all__ = ["plan", "refusals_of"]

_OVERRIDES = "sglang.srt.arg_groups.overrides"
_lock = threading.RLock()


def plan(original: Callable[[Any], bool], server_args: Any) -> bool:
    """Whether the pool is sized after capture: around SGLang's ``post_capture_kv_sizing_planned``.

    Non-unified pools get stock's answer. A unified one is sized after capture only when every target
    stands, stock's own conditions hold, and nobody refuses; each reason is logged once.
    """
    if not config_view(server_args).enable_unified_memory:
        if runtime.attached:
            runtime.log_once(
                logging.INFO,
                "kvarena: nothing to do: --enable-unified-memory is off, and other pools are not touched.",
            )
        return original(server_args)
    resolution = current_resolution.get()
    if resolution is not None:
        resolution.asked = True
        if resolution.answer is not None:
            return resolution.answer
    answer = _decide(original, server_args)
    if resolution is not None and answer:
        resolution.promised = True
    return answer


def _decide(original: Callable[[Any], bool], server_args: Any) -> bool:
    refusals = refusals_of(original, server_args)
    for refusal in refusals:
        setting = f" ({refusal.setting})" if refusal.setting else ""
        runtime.log_once(
            logging.WARNING, f"kvarena: not sized after capture [{refusal.code}]: {refusal.reason}.{setting}"
        )
    runtime.planned = not refusals
    return runtime.planned or _without_us(original, server_args)


def refusals_of(original: Callable[[Any], bool], server_args: Any) -> tuple[Refusal, ...]:
    """Every reason at once: of hooks, release, configuration, third parties and SGLang itself."""
    family, support = runtime.family, runtime.support
    problems = runtime.problems()
    if problems or family is None or support is None:
        return tuple(Refusal("not_applied", "", problem) for problem in problems)
    if support is Support.PLANNER_ONLY:
        return (_release_refusal(),)
    try:
        _say_what_has_no_effect(server_args)
        found = list(own_refusals(server_args, own_virtual_ids=family.own_virtual_ids))
        found += _collect(request_from(server_args, drafts_are_stocks_business=support is Support.NATIVE))
        found += _transfer_refusals(server_args)
    except Exception as error:  # noqa: BLE001 - SGLang's own code is asked, which may raise anything
        # A configuration that cannot be read is refused, never guessed at.
        return (Refusal("unreadable", "", f"this configuration cannot be read ({error!r}); report it"),)
    if not found and not _stock_agrees(original, server_args):
        found.append(Refusal("stock", ENVIRONMENT, "SGLang's own planner refuses it and gives no reason"))
    return tuple(dict.fromkeys(found))


def _transfer_refusals(server_args: Any) -> list[Refusal]:
    """Transfers that this server would make through functions that nobody has tested."""
    cfg, choice = config_view(server_args), runtime.choice
    backend = str(cfg.disaggregation_transfer_backend) if cfg.disaggregation_mode != "null" else ""
    # Came with 0.5.19; before, there were no direct linkers.
    linker = bool(getattr(cfg, "enable_unified_cache_external_linker", False))
    found = []
    for target, difference in ({} if choice is None else choice.unfit).items():
        setting = ""
        if linker and target.use in (Use.LINKER, Use.TRANSFERS):
            setting = "--enable-unified-cache-external-linker"
        elif backend and target.use in (backend, Use.TRANSFERS):
            setting = "--disaggregation-mode"
        if setting:
            found.append(
                Refusal("transfer_target", setting, f"what it is used for was never tested so: {difference}")
            )
    return found


def _say_what_has_no_effect(server_args: Any) -> None:
    cfg, settings = config_view(server_args), runtime.settings
    if settings is None:
        return
    backend = cfg.disaggregation_transfer_backend if cfg.disaggregation_mode != "null" else None
    if set(settings.transfer) - {backend}:
        runtime.log_once(
            logging.WARNING,
            f"kvarena: KVARENA_TRANSFER={','.join(settings.transfer)} has no effect: SGLang transfers by "
            f"{backend or 'nothing'} here (--disaggregation-mode, --disaggregation-transfer-backend).",
        )
    if settings.same_host and backend != "mooncake":
        runtime.log_once(
            logging.WARNING,
            "kvarena: KVARENA_SAME_HOST has no effect: it is for prefill and decode servers with Mooncake "
            "(--disaggregation-mode, --disaggregation-transfer-backend mooncake).",
        )


def _without_us(original: Callable[[Any], bool], server_args: Any) -> bool:
    """Stock's answer, except that a release that never resizes a unified pool must not plan to."""
    answer = original(server_args)
    if answer and runtime.family is not None and runtime.family.ignores_unified:
        runtime.log_once(
            logging.WARNING,
            "kvarena: SGLang's planner would drop the memory reserve for a unified pool that this "
            "release never resizes; the reserve is kept.",
        )
        return False
    return bool(answer)


def _collect(request: Any) -> list[Refusal]:
    from kvarena.plugin.composition import collect_refusals

    try:
        return list(collect_refusals(runtime.manager, request))
    except KvArenaError as error:
        return [Refusal("plugin", "KVARENA_BLOCK_PLUGINS", str(error))]


def _stock_agrees(original: Callable[[Any], bool], server_args: Any) -> bool:
    """Stock's conditions, as if sizing were on (and unified memory off, where stock rejects that)."""
    with _lock, _switched_on(), _unified_hidden(runtime.support is Support.BACKPORT):
        return bool(original(server_args))


def _release_refusal() -> Refusal:
    assert runtime.family is not None
    if is_experimental(runtime.family, runtime.release):
        return Refusal(
            "experimental",
            "KVARENA_SGLANG_EXPERIMENTAL",
            f"SGLang {runtime.release} is supported as an experiment only; set KVARENA_SGLANG_EXPERIMENTAL=1",
        )
    return Refusal("release", "", f"SGLang {runtime.release} is too old; use 0.5.20 or later")


@contextlib.contextmanager
def _switched_on() -> Iterator[None]:
    """KVARENA_ENABLE is all that an operator sets; stock's variable stays as it is for other pools."""
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ENVIRONMENT, None)
        else:
            os.environ[ENVIRONMENT] = before


@contextlib.contextmanager
def _unified_hidden(hide: bool) -> Iterator[None]:
    """Let stock's planner read every argument but one as it is; published arguments refuse writes."""
    if not hide:
        yield
        return
    from kvarena.plugin.engines.sglang.families.shapes import resolve

    try:
        overrides = resolve(_OVERRIDES)
        view = overrides.resolving_view
    except (LookupError, AttributeError):
        yield  # the planner is a method that does not look at unified memory
        return
    overrides.resolving_view = lambda server_args: _WithoutUnified(view(server_args))
    try:
        yield
    finally:
        overrides.resolving_view = view


class _WithoutUnified:
    __slots__ = ("_view",)

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return False if name == "enable_unified_memory" else getattr(self._view, name)
