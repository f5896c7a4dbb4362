"""The contract tests need one real SGLang release each, which prepare.py puts on the path."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
RELEASE = os.environ.get("KVARENA_CONTRACT_RELEASE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a release there is nothing to test against."""
    skip = pytest.mark.skip(reason="needs a real SGLang wheel: make contract")
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("sglang") and not RELEASE:
            item.add_marker(skip)


def _load(name: str) -> ModuleType:
    """A helper of this folder, under a name that no other test folder has."""
    full = f"kvarena_tests_sglang_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


@pytest.fixture(scope="session")
def rig_module() -> ModuleType:
    """Helpers that need no fixture of their own."""
    return _load("rig")


@pytest.fixture(scope="session")
def runner_module() -> ModuleType:
    """Builds model runners."""
    return _load("runner")


@pytest.fixture(scope="session")
def load_helper() -> Callable[[str], ModuleType]:
    """Loads helpers of one theme."""
    return _load


@pytest.fixture(scope="session")
def sglang() -> Iterator[Any]:
    """The release, imported, with kvarena attached by SGLang's own `load_plugins`."""
    assert RELEASE
    patch = pytest.MonkeyPatch()
    patch.setenv("KVARENA_ENABLE", "1")
    patch.setenv("KVARENA_SGLANG_EXPERIMENTAL", "1")
    patch.setenv("KVARENA_STATUS", "0")
    with warnings.catch_warnings():
        # What SGLang and transformers warn about at import is not ours to judge.
        warnings.simplefilter("ignore")
        _load("mocks").install()
        yield _load("rig").Release(RELEASE)
    patch.undo()


@pytest.fixture
def rig(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds pools of the release; closes whatever a test leaves open."""
    rig = _load("rig").Rig(sglang, monkeypatch)
    yield rig
    rig.close()
