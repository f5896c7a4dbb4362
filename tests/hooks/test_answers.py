"""Answers of the wrong type and wrappers that raise are the failures of the plugins that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvarena.hooks import HookError, HookManager, PluginLoadError, create_manager, hookimpl
from kvarena.pool import HostVmm, Refusal
from kvarena.transfer import RecordingEngine

REFUSAL = Refusal(code="mine", setting="MINE", reason="no")


class Answers:
    plugin_name = "answers"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def kvarena_driver(self, device: object) -> Any:
        return self.answer

    @hookimpl
    def kvarena_budget(self, request: object) -> Any:
        return self.answer

    @hookimpl
    def kvarena_refusals(self, request: object) -> Any:
        return self.answer

    @hookimpl
    def kvarena_transfer_engines(self, config: object) -> Any:
        return self.answer


def ask(hook: str, answer: object) -> Any:
    argument = {"driver": "device", "transfer_engines": "config"}.get(hook, "request")
    manager = create_manager([Answers(answer)], entry_points=False)
    return getattr(manager.hook, f"kvarena_{hook}")(**{argument: None})


def broken() -> Iterator[Refusal]:
    yield REFUSAL
    raise ZeroDivisionError("in the middle")


@pytest.mark.parametrize(
    ("hook", "answer", "match"),
    [
        ("budget", "8GiB", "'8GiB', which is not a whole number"),
        ("budget", True, "True, which is not a whole number"),
        ("budget", 0.9, "which is not a whole number"),
        ("budget", float("nan"), "nan, which is not a whole number"),
        ("driver", "cuda", "'cuda', which is not a Driver"),
        ("driver", RecordingEngine(), "which is not a Driver: it has no device, granularity"),
        ("refusals", REFUSAL, "where a list belongs"),
        ("refusals", "no", "where a list belongs"),
        ("refusals", ["no"], "'no', which is not a Refusal"),
        ("refusals", [None], "None, which is not a Refusal"),
        ("refusals", broken(), "in the middle"),
        ("transfer_engines", RecordingEngine(), "where a list belongs"),
        ("transfer_engines", ["mooncake"], "'mooncake', which is not a TransferEngine"),
    ],
)
def test_nonsense_is_its_plugins_failure(hook: str, answer: object, match: str) -> None:
    with pytest.raises(HookError, match=match) as caught:
        ask(hook, answer)
    assert (caught.value.plugin, caught.value.hook) == ("answers", f"kvarena_{hook}")
    assert "KVARENA_BLOCK_PLUGINS=answers" in str(caught.value)


def test_what_fits_passes() -> None:
    budget = ask("budget", np.int64(7))
    assert (budget, type(budget)) == (7, int)
    driver, engine = HostVmm(), RecordingEngine()
    assert ask("driver", driver) is driver
    assert ask("refusals", (each for each in [REFUSAL])) == [[REFUSAL]]
    assert ask("transfer_engines", (engine,)) == [[engine]]
    assert ask("budget", None) is ask("driver", None) is None
    assert ask("refusals", None) == ask("transfer_engines", None) == []


class Wraps:
    plugin_name = "wraps"

    @hookimpl(wrapper=True)
    def kvarena_budget(self, request: object) -> Iterator[Any]:
        return (yield) + 1

    @hookimpl(wrapper=True)
    def kvarena_pool_closing(self, pool: object) -> Iterator[Any]:
        yield
        raise ZeroDivisionError("after the others")

    @hookimpl(wrapper=True)
    def kvarena_pool_resizing(self, pool: object, keep_bytes: int) -> Iterator[Any]:
        if keep_bytes:
            yield


@pytest.fixture
def wrapped() -> HookManager:
    return create_manager([Answers(7), Wraps()], entry_points=False)


def test_a_wrapper_is_named_as_any_other(wrapped: HookManager) -> None:
    with pytest.raises(HookError, match=r"'wraps' failed in .*closing: ZeroDivisionError: after") as caught:
        wrapped.hook.kvarena_pool_closing(pool=None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    # What it lets through is the other's.
    assert wrapped.hook.kvarena_budget(request=None) == 8
    wrapped.unregister(name="answers")
    wrapped.register(Answers("8GiB"), "answers")
    with pytest.raises(HookError, match="'answers' failed"):
        wrapped.hook.kvarena_budget(request=None)


def test_call_every_survives_wrappers(wrapped: HookManager) -> None:
    for hook, asked in (("closing", {"pool": None}), ("resizing", {"pool": None, "keep_bytes": 0})):
        (failure,) = wrapped.call_every(f"kvarena_pool_{hook}", **asked)
        assert isinstance(failure, HookError)
        assert failure.plugin == "wraps"


def test_one_by_one_keeps_the_order_and_the_wrappers(wrapped: HookManager) -> None:
    wrapped.register(Answers(20), "later")
    assert [one(request=None) for one in wrapped.one_by_one("kvarena_budget")] == [21, 8]


def test_a_name_that_is_taken_is_refused_by_name(wrapped: HookManager) -> None:
    with pytest.raises(PluginLoadError, match="'answers'"):
        wrapped.register(Answers(1), "answers")
    assert wrapped.hook.kvarena_budget(request=None) == 8
