"""The package list is written by hand; the folders are the truth."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TOP = ("errors", "hooks", "plugin", "pool", "transfer")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _packages() -> dict[str, str]:
    folders = {path.parent.relative_to(ROOT) for top in TOP for path in (ROOT / top).rglob("*.py")}
    return {"kvarena." + str(folder).replace("/", "."): str(folder) for folder in folders}


def test_the_lists_name_every_folder(project: dict[str, Any]) -> None:
    setuptools = project["tool"]["setuptools"]
    assert setuptools["package-dir"] == _packages()
    assert sorted(setuptools["packages"]) == sorted(_packages())


def test_every_package_has_an_init_and_is_typed() -> None:
    for folder in _packages().values():
        assert (ROOT / folder / "__init__.py").is_file(), folder
        assert (ROOT / folder / "py.typed").is_file(), folder


def test_the_links_for_type_checkers_point_to_the_folders() -> None:
    for top in TOP:
        assert (ROOT / ".types" / "kvarena" / top).resolve() == ROOT / top


def test_mooncake_is_never_a_base_dependency(project: dict[str, Any]) -> None:
    # All its variants ship mooncake/engine.so; the operator's image has one already.
    assert not [name for name in project["project"]["dependencies"] if "mooncake" in name]


def test_the_wheel_holds_every_package_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from setuptools import build_meta

    # In a copy: setuptools leaves build/ and *.egg-info where it works.
    source = tmp_path / "source"
    source.mkdir()
    for name in TOP:
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    monkeypatch.chdir(source)
    wheel = tmp_path / build_meta.build_wheel(str(tmp_path))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"kvarena"}
    for package, folder in _packages().items():
        inside = {Path(name).name for name in names if str(Path(name).parent) == package.replace(".", "/")}
        ours = {
            path.name
            for path in (ROOT / folder).iterdir()
            if path.is_file() and path.suffix in (".py", ".pyi", ".typed", ".txt", ".json", ".yaml")
        }
        assert inside == ours, package
