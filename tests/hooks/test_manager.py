"""The manager: failures carry the plugin's name, and everyone is heard at a pool's end."""

from __future__ import annotations

import types

import pytest
from kvarena.errors import KvArenaError
from kvarena.hooks import HookError, PluginLoadError, create_manager, hookimpl


class Fails:
    plugin_name = "fails"

    @hookimpl
    def kvarena_pool_reserved(self, pool: object) -> None:
        raise ZeroDivisionError("1/0")

    @hookimpl
    def kvarena_pool_closing(self, pool: object) -> None:
        raise KvArenaError("mine")


class Remembers:
    plugin_name = "remembers"

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    @hookimpl
    def kvarena_pool_reserved(self, pool: object) -> None:
        self.seen.append(("reserved", pool))

    @hookimpl
    def kvarena_pool_closing(self, pool: object) -> None:
        self.seen.append(("closing", pool))


def test_a_failing_hook_is_reported_with_its_plugin() -> None:
    manager = create_manager([Fails()], entry_points=False)
    with pytest.raises(HookError, match=r"'fails' failed in .*reserved: ZeroDivisionError: 1/0") as info:
        manager.hook.kvarena_pool_reserved(pool=None)
    assert (info.value.plugin, info.value.hook) == ("fails", "kvarena_pool_reserved")
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_errors_of_kvarena_keep_their_type() -> None:
    manager = create_manager([Fails()], entry_points=False)
    with pytest.raises(KvArenaError, match="mine") as info:
        manager.hook.kvarena_pool_closing(pool=None)
    assert type(info.value) is KvArenaError


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_call_every_reaches_those_after_a_failure(order: tuple[int, int]) -> None:
    remembers = Remembers()
    both: list[object] = [Fails(), remembers]
    manager = create_manager([both[index] for index in order], entry_points=False)
    failures = manager.call_every("kvarena_pool_closing", pool="p")
    assert [str(failure) for failure in failures] == ["mine"]
    assert remembers.seen == [("closing", "p")]


def test_first_result_goes_to_the_one_who_came_last() -> None:
    def answers(value: int) -> object:
        @hookimpl
        def kvarena_budget(request: object) -> int:
            return value

        return types.SimpleNamespace(kvarena_budget=kvarena_budget)

    manager = create_manager([answers(1), answers(2)], entry_points=False)
    assert manager.hook.kvarena_budget(request=None) == 2


@pytest.mark.parametrize(
    "function",
    ["def kvarena_no_such_hook(pool): ...", "def kvarena_pool_reserved(pool, colour): ..."],
    ids=["unknown hook", "unknown argument"],
)
def test_a_plugin_that_does_not_fit_is_refused_by_name(function: str) -> None:
    module = types.ModuleType("misfit")
    exec(f"from kvarena.hooks import hookimpl\n@hookimpl\n{function}", module.__dict__)
    manager = create_manager(entry_points=False)
    with pytest.raises(PluginLoadError, match="'misfit'"):
        manager.register(module, "misfit")
    assert not manager.has_plugin("misfit")


def test_a_blocked_plugin_is_never_registered() -> None:
    manager = create_manager([Fails()], entry_points=False, block=["fails"])
    assert not manager.has_plugin("fails")
    manager.hook.kvarena_pool_reserved(pool=None)


def test_every_hook_has_one_sentence() -> None:
    from kvarena.hooks import specs

    hooks = {name: value for name, value in vars(specs).items() if name.startswith("kvarena_")}
    assert len(hooks) == 10
    for name, function in hooks.items():
        documentation = function.__doc__
        assert documentation is not None, name
        assert "\n" not in documentation, name
