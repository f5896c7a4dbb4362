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
