"""Installed distributions of a test's own: found by this process and by the doctor's children."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install("dist-name", "1.0", modules={"mod": "source"}, entry_points={"name": "mod"})``."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))

    def make(
        name: str,
        version: str,
        *,
        modules: dict[str, str] | None = None,
        entry_points: dict[str, str] | None = None,
    ) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{key} = {value}" for key, value in (entry_points or {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[kvarena]", *lines]) + "\n")
        for module, source in (modules or {}).items():
            path = site / f"{module.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)

    return make


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("KVARENA_") and not name.startswith(("KVARENA_TEST_", "KVARENA_CONTRACT_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVARENA_SOCKET_DIR", str(tmp_path / "run"))
