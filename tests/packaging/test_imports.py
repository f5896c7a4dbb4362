"""Imports point one way, and the light ones stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_imports_point_one_way() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    if not lint.exists():
        pytest.skip("import-linter is not installed (pip install kvarena[dev])")
    result = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "module",
    ["errors", "hooks", "transfer", "plugin.commands.cli", "plugin.engines.sglang"],
)
def test_a_light_import_brings_no_torch(module: str) -> None:
    program = f"import sys, kvarena.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, those for type checkers alone do not."""
    grimp = pytest.importorskip("grimp")  # comes with import-linter
    # By the top folders: an editable install maps each by itself.
    folders = [f"kvarena.{name}" for name in ("errors", "pool", "transfer", "hooks", "plugin")]
    graph = grimp.build_graph(*folders, exclude_type_checking_imports=True, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "kvarena.transfer.same_host.copy.clock" in imported["kvarena.transfer.same_host.copy.host"]
    behind = {module: reachable(imported, module) for module in imported}
    circular = {module for module in imported if module in behind[module]}
    assert circular == set()


def reachable(imported: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(imported[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imported[module]
    return found
