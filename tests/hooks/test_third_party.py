"""A third party's plugin, installed as a real distribution in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent / "example_plugin"

PIP = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")

PROGRAM = """
import json, sys
from kvarena.plugin.config import load_settings
from kvarena.plugin.composition import make_manager
manager = make_manager(load_settings())
print(json.dumps({
    "plugins": sorted(name for name, plugin in manager.list_name_plugin() if plugin is not None),
    "budget": manager.hook.kvarena_budget(request=None) if manager.has_plugin("example") else None,
    "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "kvarena_example.py"):
        (source / name).write_bytes((EXAMPLE / name).read_bytes())
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            target,
            source,
        ],
        check=True,
    )
    return target


def _run(site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(site)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_installed_plugin_is_found_and_asked(installed: Path) -> None:
    answer = json.loads(_run(installed).stdout)
    assert "example" in answer["plugins"]
    # A third party is asked before the built-in answers.
    assert answer["budget"] == 123 << 20
    assert answer["torch"] is False


@pytest.mark.parametrize("setting", [{"KVARENA_LOAD_PLUGINS": "0"}, {"KVARENA_BLOCK_PLUGINS": "example"}])
def test_an_installed_plugin_can_be_left_out(installed: Path, setting: dict[str, str]) -> None:
    assert "example" not in json.loads(_run(installed, **setting).stdout)["plugins"]


def test_a_broken_plugin_is_named(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "kvarena_example.py").write_text("import no_such_module")
    site = os.pathsep.join([str(tmp_path), str(installed)])
    result = _run(Path(site))
    assert result.returncode == 1
    assert "plugin 'example' of the entry-point group 'kvarena' cannot be loaded" in result.stderr
    assert "KVARENA_BLOCK_PLUGINS=example" in result.stderr
