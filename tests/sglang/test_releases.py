"""A release that nobody has tested is served only where its code is that of one that was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.engines.sglang import families
from kvarena.plugin.engines.sglang.families.fingerprints import fingerprint_of, recorded
from kvarena.plugin.engines.sglang.families.source import SglangSource
from kvarena.plugin.engines.sglang.families.targets import Use
from kvarena.plugin.engines.sglang.runtime import runtime

pytestmark = pytest.mark.sglang

NEW = "0.9.0"
POOL = "sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool"
CONN = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager"


class Fake:
    """The release's own wheel in another folder, in which files can be edited."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._real = SglangSource.installed()
        import sglang

        self._origin = Path(sglang.__path__[0]).parent
        self._link(self._origin / "sglang", folder / "sglang")

    def edit(self, module: str, change: Callable[[str], str]) -> None:
        """Rewrite one module."""
        *folders, last = module.split(".")
        here, there = self.folder, self._origin
        for name in folders:
            here, there = here / name, there / name
            if here.is_symlink():
                here.unlink()
                self._link(there, here)
        path = here / f"{last}.py"
        before = path.read_text(encoding="utf-8")
        path.unlink()
        path.write_text(change(before), encoding="utf-8")
        assert path.read_text(encoding="utf-8") != before

    def insert(self, path: str, statement: str) -> None:
        """Begin a function's body with one more statement."""
        found = self._real.find(path)
        assert found is not None
        first = found.node.body[0]

        def change(text: str) -> str:
            lines = text.splitlines(keepends=True)
            lines.insert(first.end_lineno or 0, " " * first.col_offset + statement + "\n")
            return "".join(lines)

        self.edit(found.module, change)

    def choose(self, release: str = NEW) -> families.Choice:
        """What kvarena would do in it."""
        return families.choose(release, experimental=True, source=SglangSource(self.folder))

    @staticmethod
    def _link(there: Path, here: Path) -> None:
        here.mkdir()
        for each in there.iterdir():
            if each.name != "__pycache__":
                (here / each.name).symlink_to(each)


@pytest.fixture
def fake(sglang: Any, tmp_path: Path) -> Fake:
    """A release that is like the installed one, until it is edited."""
    return Fake(tmp_path)


def stored_in(sglang: Any) -> str:
    """The allocator of one side."""
    return str(sglang.family.storing[-1])


def test_the_installed_release_is_the_one_that_is_recorded(sglang: Any) -> None:
    found = fingerprint_of(sglang.family, SglangSource.installed())
    assert found.differences(recorded()[sglang.version], sglang.version) == {}
    assert len(found.bodies) >= 20
    assert min(len(names) for names in found.attributes.values()) >= 12


def test_every_tested_release_is_recorded_with_what_its_family_names() -> None:
    for family in families.FAMILIES:
        for release in family.releases:
            kept = recorded()[release]
            assert set(kept.attributes) == set(family.storing)
            assert {target.path for target in family.targets if target.body} <= set(kept.bodies)
    assert len(recorded()) == sum(len(family.releases) for family in families.FAMILIES)


def test_a_stored_capacity_that_came_with_a_release_tells_it_from_the_one_before() -> None:
    """0.5.23 added a value that a resize must change; its signatures are those of 0.5.22."""
    differences = recorded()["0.5.23"].differences(recorded()["0.5.22"], "0.5.22")
    assert any("'_move_max_pages', unlike 0.5.22" in each for each in differences.values())


def test_comments_docstrings_and_annotations_do_not_count(fake: Fake, sglang: Any) -> None:
    fake.edit(
        "sglang.srt.mem_cache.unified_memory_pool",
        lambda text: "# a comment\n" + text.replace("(self) -> None:", "(self):\n        # another\n"),
    )
    choice = fake.choose()
    assert (choice.family, choice.reasons, choice.unfit) == (sglang.family, (), {})
    assert choice.targets() == sglang.choice.targets()
    assert f"SGLang {NEW} was never tested" in choice.untested


def test_one_more_stored_capacity_refuses_the_release(fake: Fake, sglang: Any) -> None:
    path = stored_in(sglang)
    fake.insert(f"{path}.__init__", "self._reach = 1")
    choice = fake.choose()
    assert choice.family is None
    assert choice.reasons == (f"{path} stores '_reach', unlike {sglang.version}",)


def test_a_value_that_a_helper_of_the_constructor_stores_counts_too(fake: Fake, sglang: Any) -> None:
    path = stored_in(sglang)
    fake.insert(f"{path}.__init__", "self._prepare_reach()")
    fake.insert(f"{path}.clear", "self._cleared = True")
    assert any("stores '_cleared'" in reason for reason in fake.choose().reasons)


def test_a_renamed_private_attribute_refuses_the_release(fake: Fake, sglang: Any) -> None:
    fake.edit(
        "sglang.srt.mem_cache.unified_memory_pool", lambda text: re.sub(r"\b_max_slots\b", "_limits", text)
    )
    choice = fake.choose()
    assert choice.family is None
    stores = next(reason for reason in choice.reasons if reason.startswith(f"{POOL} stores"))
    assert "stores '_limits' and no longer stores '_max_slots'" in stores


@pytest.mark.parametrize("release", [NEW, "its own"])
def test_a_replaced_function_with_another_body_refuses_the_release(
    fake: Fake, sglang: Any, release: str
) -> None:
    """Also under a number that was tested: then it is not what was tested."""
    path = next(t.path for t in sglang.family.targets if t.path.endswith("SWATokenToKVPoolAllocator.resize"))
    fake.insert(path, "config = config or None")
    choice = fake.choose(NEW if release == NEW else sglang.version)
    assert choice.family is None
    assert f"{path} has another body since {sglang.version}" in choice.reasons


def test_a_removed_helper_refuses_the_release(fake: Fake, sglang: Any) -> None:
    path = f"{POOL}.max_slots"
    fake.edit("sglang.srt.mem_cache.unified_memory_pool", lambda text: text.replace("def max_slots", "def m"))
    assert f"{path} is gone since {sglang.version}" in fake.choose().reasons


def test_a_changed_transfer_target_refuses_its_transfers_alone(
    fake: Fake,
    sglang: Any,
    rig_module: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = f"{CONN}.register_buffer_to_engine"
    fake.insert(path, "self.registered = True")
    choice = fake.choose()
    assert (choice.family, choice.reasons) == (sglang.family, ())
    (target,) = choice.unfit
    assert (target.path, target.use) == (path, Use.MOONCAKE)
    assert choice.targets() == tuple(each for each in sglang.choice.targets() if each is not target)
    monkeypatch.setattr(runtime, "choice", choice)
    runtime._said.clear()
    assert rig_module.plan(sglang, rig_module.planner_arguments(sglang)) is True
    nixl = {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "nixl"}
    assert rig_module.plan(sglang, rig_module.planner_arguments(sglang, **nixl)) is True
    pair = rig_module.planner_arguments(sglang, disaggregation_mode="prefill")
    assert rig_module.plan(sglang, pair) is False
    (line,) = [each.getMessage() for each in caplog.records if "transfer_target" in each.getMessage()]
    assert f"{path} has another body since {sglang.version}" in line
    assert "(--disaggregation-mode)" in line


def test_changed_lengths_of_buffers_refuse_every_transfer(
    fake: Fake, sglang: Any, rig_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {t.path: t for t in sglang.family.targets if t.use is Use.TRANSFERS}
    if not targets:
        pytest.skip("this release's pools have none: PD is refused")
    fake.insert(next(iter(targets)), "self.asked = True")
    monkeypatch.setattr(runtime, "choice", fake.choose())
    for changes in (
        {"disaggregation_mode": "decode"},
        {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "nixl"},
        {"enable_unified_cache_external_linker": True},
    ):
        arguments = rig_module.planner_arguments(sglang, **changes)
        assert rig_module.plan(sglang, arguments) is False, changes
    assert rig_module.plan(sglang, rig_module.planner_arguments(sglang)) is True


def test_a_source_that_cannot_be_parsed_refuses_the_release(fake: Fake) -> None:
    fake.edit("sglang.srt.mem_cache.unified_memory_pool", lambda text: text + "\ndef (:\n")
    (reason,) = fake.choose().reasons
    assert "its source cannot be read" in reason


SCRIPT = """
import importlib.metadata, logging, sys
import mocks
mocks.install()
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
importlib.metadata.version = (lambda real: lambda name: "0.9.0" if name == "sglang" else real(name))(
    importlib.metadata.version
)
from sglang.srt.plugins import load_plugins
load_plugins()
from kvarena.plugin.engines.sglang.runtime import runtime
print("attached", runtime.attached)
"""


@pytest.mark.parametrize("changed", [False, True])
def test_a_process_of_an_untested_release_says_so(fake: Fake, sglang: Any, changed: bool) -> None:
    if changed:
        fake.insert(f"{stored_in(sglang)}.__init__", "self._reach = 1")
    here = str(Path(__file__).parent)
    path = os.pathsep.join([str(fake.folder), here, os.environ["PYTHONPATH"]])
    environ = os.environ | {
        "KVARENA_ENABLE": "1",
        "KVARENA_SGLANG_EXPERIMENTAL": "1",
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=200, check=True
    )
    assert f"attached {not changed}" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "kvarena:" in line]
    if changed:
        (line,) = lines
        assert line.startswith("WARNING kvarena: SGLang 0.9.0 is not supported and runs unmodified")
        assert f"stores '_reach', unlike {sglang.version}" in line
    else:
        assert lines[0].startswith("WARNING kvarena: SGLang 0.9.0 was never tested")
        assert lines[1].startswith("INFO kvarena: attached to SGLang 0.9.0")
