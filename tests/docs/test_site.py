"""The site builds without a warning, and the generated page is current."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        # The theme advertises its successor as a warning.
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_hook_reference_is_current() -> None:
    result = run("tools/hook_reference.py", "--check")
    assert result.returncode == 0, result.stderr


def test_the_site_builds_with_warnings_as_errors(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install 'kvarena[docs]'")
    result = run("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    assert result.returncode == 0, result.stderr
    pages = {str(page.relative_to(tmp_path / "site")) for page in (tmp_path / "site").rglob("index.html")}
    assert {"index.html", "operator/index.html", "engines/embedded/index.html"} <= pages
