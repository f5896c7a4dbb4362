"""SGLang finds kvarena, applies it, and the application is proven, not believed."""

from __future__ import annotations

import collections
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.engines.sglang import attach, families, register
from kvarena.plugin.engines.sglang.families.shapes import differences, resolve
from kvarena.plugin.engines.sglang.families.targets import HookKind, Support
from kvarena.plugin.engines.sglang.request import ENVIRONMENT
from kvarena.plugin.engines.sglang.runtime import runtime

pytestmark = pytest.mark.sglang


@pytest.fixture
def unattached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that SGLang has not called yet; the hooks that stand stay."""
    for name in ("attached", "choice", "family", "support", "settings", "_problems", "planned"):
        monkeypatch.setattr(runtime, name, False if name == "attached" else None)


def test_every_target_of_the_release_is_applied(sglang: Any) -> None:
    assert sglang.version in sglang.family.releases
    assert runtime.attached
    assert runtime.problems() == []
    targets = sglang.choice.targets()
    assert len(targets) >= 10
    assert {t.path for t in targets if t.kind is HookKind.AROUND} <= sglang.registry._patched
    for target in targets:
        if target.kind is HookKind.PROPERTY:
            assert isinstance(resolve(target.path), property)


def test_the_entry_point_is_what_sglang_called(sglang: Any) -> None:
    sources = {
        source.plugin_name
        for target in sglang.choice.targets()
        if target.kind is HookKind.AROUND
        for _, _, source in sglang.registry._hooks[target.path]
    }
    assert sources == {"kvarena"}


def test_register_again_changes_nothing(sglang: Any, unattached: None) -> None:
    hooks = {path: list(entries) for path, entries in sglang.registry._hooks.items()}
    register()
    register()
    assert runtime.attached
    assert {path: list(entries) for path, entries in sglang.registry._hooks.items()} == hooks
    assert runtime.problems() == []


def test_off_means_off(sglang: Any, unattached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARENA_ENABLE", "0")
    register()
    assert not runtime.attached


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [("KVARENA_NONSENSE", "1", "KVARENA_NONSENSE"), ("KVARENA_POOL_BYTES", "many", "pool_bytes")],
)
def test_bad_settings_are_one_line_and_a_stock_server(
    sglang: Any,
    unattached: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    named: str,
) -> None:
    monkeypatch.setenv(name, value)
    register()
    assert not runtime.attached
    assert len(caplog.records) == 1
    assert named in caplog.text
    assert "runs unmodified" in caplog.text


def test_no_sglang_is_one_line(
    sglang: Any, unattached: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attach, "release_of_sglang", lambda: None)
    register()
    assert not runtime.attached
    assert [record.getMessage() for record in caplog.records] == [
        "kvarena: KVARENA_ENABLE is set but SGLang is not installed; nothing is done."
    ]


def test_a_missing_target_and_a_changed_signature_refuse_the_release_by_name(
    sglang: Any, unattached: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(sglang.pools.UnifiedKVPool, "_build_mamba_views")
    configurator = resolve("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator")
    monkeypatch.setattr(configurator, "config_from_budget", lambda self, budget_bytes, tokens: None)
    register()
    assert not runtime.attached
    (line,) = [record.getMessage() for record in caplog.records]
    assert sglang.version in line
    assert "_build_mamba_views is missing" in line
    assert "config_from_budget(self, budget_bytes, tokens)" in line
    assert "cap_tokens=None" in line


def test_parameters_with_defaults_may_be_added_where_they_are_handed_on(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wider(self: Any, new: int = 0) -> None: ...

    own = inspect.signature(sglang.pools.UnifiedKVPool.__init__)
    new = inspect.Parameter("new", inspect.Parameter.KEYWORD_ONLY, default=0)
    wider.__signature__ = own.replace(parameters=[*own.parameters.values(), new])  # type: ignore[attr-defined]
    monkeypatch.setattr(sglang.pools.UnifiedKVPool, "__init__", wider)
    assert differences(sglang.family) == {}


async def _awaited(self: Any, budget_bytes: int, *, cap_tokens: int | None = None) -> None: ...


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (lambda self, budget_bytes, *, cap_tokens=0: None, "cap_tokens=0"),
        (lambda self, budget_bytes, *, cap_tokens: None, "*, cap_tokens)"),
        (lambda self, budget_bytes=0, *, cap_tokens=None: None, "budget_bytes=0"),
        (lambda self, budget_bytes, cap_tokens=None: None, "budget_bytes, cap_tokens=None)"),
        (lambda self, budget_bytes, *, cap_tokens=None, new=0: None, "new=0"),
        (lambda self, budget_bytes, *, cap_tokens=None, **new: None, "**new"),
        (staticmethod(lambda budget_bytes, *, cap_tokens=None: None), "(budget_bytes,"),
        (property(lambda self: None), "has no signature"),
        (_awaited, "is a coroutine"),
    ],
    ids=["default", "mandatory", "optional", "positional", "more", "keywords", "static", "property", "async"],
)
def test_a_target_of_another_shape_is_refused_by_name_and_nothing_is_applied(
    sglang: Any,
    unattached: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shape: Any,
    named: str,
) -> None:
    hooks: dict[str, list[Any]] = collections.defaultdict(list)
    monkeypatch.setattr(sglang.registry, "_hooks", hooks)
    for target in sglang.family.targets:
        if target.kind is HookKind.PROPERTY:
            owner, _, name = target.path.rpartition(".")
            monkeypatch.delattr(resolve(owner), name)
    configurator = resolve("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator")
    monkeypatch.setattr(configurator, "config_from_budget", shape)
    register()
    assert not runtime.attached
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"SGLang {sglang.version} is not supported" in line
    assert "config_from_budget" in line
    assert named in line
    assert not any(hooks.values())
    for target in sglang.family.targets:
        if target.kind is HookKind.PROPERTY:
            owner, _, name = target.path.rpartition(".")
            assert name not in vars(resolve(owner))


def test_a_hook_registry_of_another_shape_is_refused_by_name(
    sglang: Any, unattached: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(sglang.registry, "_patched")
    register()
    assert not runtime.attached
    (line,) = [record.getMessage() for record in caplog.records]
    assert "HookRegistry._patched is missing" in line


def test_a_linker_is_optional_but_not_its_shape(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its registration under another name would be that of the whole reservation, unseen."""
    path = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_direct_linker.MooncakeDirectLinker"
    target = next(t for t in sglang.family.targets if t.path == f"{path}.register_buffers")
    active = sglang.choice.targets()
    assert (target in active) is (sglang.number >= 19)
    if target not in active:
        assert differences(sglang.family) == {}
        return
    linker = resolve(path)
    monkeypatch.setattr(linker.__base__, "register_buffers", linker.register_buffers, raising=False)
    monkeypatch.delattr(linker, "register_buffers")
    assert target in sglang.choice.targets()  # inherited
    monkeypatch.delattr(linker.__base__, "register_buffers")
    (difference,) = differences(sglang.family).values()
    assert f"{target.path} is missing" in difference


def test_a_registration_of_hooks_that_ends_early_plans_nothing(
    sglang: Any, rig_module: Any, unattached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks that stand must not act on their own: the planner would give the reserve away."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(attach, "_register", fail)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    register()
    assert not runtime.attached
    assert runtime.family is sglang.family
    assert runtime.problems() == ["kvarena is not attached to this process"]
    assert rig_module.plan(sglang, rig_module.planner_arguments(sglang)) is False
    assert runtime.planned is False


def test_an_unknown_release_with_known_shapes_needs_no_code(sglang: Any) -> None:
    choice = families.choose("0.9.0", experimental=True)
    assert choice.family is sglang.family
    assert choice.reasons == ()
    assert choice.unfit == {}
    assert f"0.9.0 was never tested; where kvarena changes or calls it, its code is {sglang.version}'s" in (
        choice.untested
    )


def test_a_release_that_somebody_else_half_changed_is_refused_by_the_other_families(sglang: Any) -> None:
    for family in families.FAMILIES:
        if family is not sglang.family:
            assert differences(family), f"{family.name} would take SGLang {sglang.version}"


def test_experimental_releases_get_the_planner_alone_unless_asked_for(sglang: Any) -> None:
    choice = families.choose(sglang.version, experimental=False)
    assert choice.family is sglang.family
    assert choice.support is (Support.PLANNER_ONLY if sglang.number < 20 else sglang.family.support)
    assert choice.untested == ""
    if choice.support is Support.PLANNER_ONLY:
        assert choice.targets() == (sglang.family.planner,)


@pytest.mark.parametrize("experimental", [False, True])
def test_an_unknown_release_of_other_shapes_is_refused_whatever_its_planner_looks_like(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, experimental: bool
) -> None:
    configurator = resolve("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator")
    monkeypatch.setattr(configurator, "config_from_budget", lambda self: None)
    choice = families.choose("0.9.0", experimental=experimental)
    assert choice.family is None
    assert any("config_from_budget" in reason for reason in choice.reasons)


def test_a_release_that_was_never_tested_is_an_experiment_where_its_family_is(sglang: Any) -> None:
    """SGLang makes releases like 0.5.15.post1."""
    release = f"{sglang.version}.post1"
    choice = families.choose(release, experimental=True)
    assert (choice.family, choice.reasons) == (sglang.family, ())
    assert choice.support is sglang.family.support
    cautious = families.choose(release, experimental=False).support
    assert cautious is (Support.PLANNER_ONLY if sglang.number < 20 else sglang.family.support)


def test_a_hook_that_was_not_applied_makes_everything_stock(
    sglang: Any, rig: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang logs and swallows what fails while it applies hooks; here one of ours got lost so."""
    lost = sglang.choice.targets()[1].path
    monkeypatch.setattr(sglang.registry, "_patched", sglang.registry._patched - {lost})
    monkeypatch.setattr(runtime, "_problems", None)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    runtime._said.clear()
    arguments = rig_module.planner_arguments(sglang)
    assert rig_module.plan(sglang, arguments) is False
    assert not runtime.acts()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"[not_applied]: the hook on {lost} was not applied" in line
    if not sglang.hardened:
        assert rig.reserved(256, 128).kv.post_capture_active is False


def test_a_hook_that_something_replaced_makes_everything_stock(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = sglang.choice.targets()[-1]
    owner, _, name = target.path.rpartition(".")
    monkeypatch.setattr(resolve(owner), name, lambda self: None)
    monkeypatch.setattr(runtime, "_problems", None)
    assert runtime.problems() == [f"the hook on {target.path} was applied, but something replaced it"]


def test_two_plugins_on_one_target_make_everything_stock(
    sglang: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve("sglang.srt.plugins.hook_registry.HookSource")("other", "other-dist")
    kind = resolve("sglang.srt.plugins.hook_registry.HookType").REPLACE
    path = sglang.choice.targets()[1].path
    entries = [*sglang.registry._hooks[path], (kind, lambda *a, **k: None, source)]
    monkeypatch.setitem(sglang.registry._hooks, path, entries)
    monkeypatch.setattr(runtime, "_problems", None)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert runtime.problems() == [f"{path} is hooked by another plugin too (other)"]
    assert rig_module.plan(sglang, rig_module.planner_arguments(sglang)) is False


def test_a_class_that_another_plugin_replaced_makes_everything_stock(
    sglang: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang applies that first, and our hooks to whatever stands there then."""
    source = resolve("sglang.srt.plugins.hook_registry.HookSource")("other", "other-dist")
    kind = resolve("sglang.srt.plugins.hook_registry.HookType").REPLACE
    path = "sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool"
    monkeypatch.setitem(sglang.registry._hooks, path, [(kind, type("Pool", (), {}), source)])
    monkeypatch.setattr(runtime, "_problems", None)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    problem = f"{path} is hooked by another plugin too (other)"
    assert runtime.problems() == [problem]
    assert rig_module.plan(sglang, rig_module.planner_arguments(sglang)) is False
    # The same, with a class that lacks what we hook.
    monkeypatch.setattr(sglang.pools, "UnifiedKVPool", type("Pool", (), {}))
    monkeypatch.setattr(runtime, "_problems", None)
    assert runtime.problems() == [problem]
    monkeypatch.delitem(sglang.registry._hooks, path)
    monkeypatch.setattr(sglang.pools, "UnifiedSWAKVPool", type("Pool", (), {}))
    monkeypatch.setattr(runtime, "_problems", None)
    assert any("something replaced it" in each or "is missing" in each for each in runtime.problems())
    assert rig_module.plan(sglang, rig_module.planner_arguments(sglang)) is False


@pytest.mark.parametrize("kind", ["REPLACE", "AROUND"])
@pytest.mark.parametrize(
    ("path", "since"),
    [
        ("sglang.srt.model_executor.model_runner.KVCacheConfigurator.config_from_budget", 17),
        (
            "sglang.srt.model_executor.model_runner_components.kv_pool_runtime.post_capture_kv_sizing_planned",
            19,
        ),
    ],
    ids=["class", "function"],
)
def test_a_plugin_that_knows_a_target_by_another_name_makes_everything_stock(
    sglang: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch, path: str, since: int, kind: str
) -> None:
    """Modules hand on what they import; applied by SGLang itself, over our hook."""
    if sglang.number < since:
        pytest.skip("the planner is a method, and has no other name")
    owner, _, name = path.rpartition(".")
    hooked = resolve(path)
    # SGLang spreads a hook to every module that holds the function; all are taken back after the test.
    holders = [
        each for each in list(sys.modules.values()) if getattr(each, "__dict__", {}).get(name) is hooked
    ]
    for holder in (resolve(owner), *holders):
        monkeypatch.setattr(holder, name, hooked)
    monkeypatch.setattr(sglang.registry, "_patched", set(sglang.registry._patched))
    source = resolve("sglang.srt.plugins.hook_registry.HookSource")("other", "other-dist")
    entry = (resolve("sglang.srt.plugins.hook_registry.HookType")[kind], lambda *a, **k: False, source)
    monkeypatch.setitem(sglang.registry._hooks, path, [entry])
    sglang.registry.apply_hooks()
    assert path in sglang.registry._patched
    monkeypatch.setattr(runtime, "_problems", None)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert runtime.problems() == [f"{path} is hooked by another plugin too (other)"]
    assert rig_module.plan(sglang, rig_module.planner_arguments(sglang)) is False


def test_a_class_replaced_by_another_name_makes_everything_stock(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "sglang.srt.model_executor.model_runner.KVCacheConfigurator"
    source = resolve("sglang.srt.plugins.hook_registry.HookSource")("other", "other-dist")
    kind = resolve("sglang.srt.plugins.hook_registry.HookType").REPLACE
    replaced = type("Mine", (resolve(path),), {})
    for module in ("sglang.srt.model_executor.model_runner", "sglang.srt.mem_cache.kv_cache_configurator"):
        monkeypatch.setattr(resolve(module), "KVCacheConfigurator", replaced)  # as SGLang spreads it
    monkeypatch.setitem(sglang.registry._hooks, path, [(kind, replaced, source)])
    monkeypatch.setattr(runtime, "_problems", None)
    assert runtime.problems() == [f"{path} is hooked by another plugin too (other)"]


@pytest.mark.parametrize(
    "listed", ["", "kvarena", " other , kvarena ", "other", "kvarena-other", ",", " ", " ,"]
)
def test_the_doctor_reads_the_list_of_plugins_as_sglang_does(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    loaded = resolve("sglang.srt.plugins.load_plugins_by_group")("sglang.srt.plugins")
    assert ("kvarena" in loaded) is (attach.refused_by_environment() is None)


SCRIPT = """
import logging, os, sys
import mocks
mocks.install()
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
from sglang.srt.plugins import load_plugins
load_plugins()
from kvarena.plugin.engines.sglang.attach import refused_by_environment
from kvarena.plugin.engines.sglang.runtime import runtime
print("attached", runtime.attached, refused_by_environment())
"""


def test_a_process_whose_plugins_leave_us_out_runs_as_stock() -> None:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ["PYTHONPATH"]])
    environ = os.environ | {"KVARENA_ENABLE": "1", "PYTHONPATH": path, "SGLANG_PLUGINS": "another"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    assert "attached False SGLANG_PLUGINS=another leaves kvarena out" in done.stdout
    assert "Skipping plugin kvarena" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_entry_point_is_light() -> None:
    code = "import kvarena.plugin.engines.sglang as e, sys; e.register(); print('torch' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVARENA_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=Path("/"), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
