"""The gather-scatter kernels without a GPU: what they copy when interpreted, and the code they become."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPTS = ("interpreted.py", "compiled.py")


def _run(script: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(HERE / script)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return {entry.pop("name"): entry for entry in json.loads(done.stdout)}


@pytest.fixture(scope="module", autouse=True)
def _triton() -> None:
    if importlib.util.find_spec("triton") is None:
        assert "KVARENA_KERNELS" not in os.environ, "make kernels installs Triton"
        pytest.skip("Triton is not installed: make kernels")


def test_every_byte_lands_where_it_should_and_no_other_changes() -> None:
    outcomes = _run("interpreted.py")

    assert len(outcomes) == 28
    assert [name for name, outcome in outcomes.items() if not outcome["right"]] == []
    # A page of 1 MiB takes several programs, as do spans that are longer than one.
    assert outcomes["pages-1048576-aligned"]["programs"] == 5 * 8
    assert outcomes["spans-aligned"]["programs"] == 1 + 1 + 3 + 2
    assert outcomes["short-spans-aligned"]["programs"] == 1 + 1


def test_the_kernels_compile_to_wide_accesses_without_spills() -> None:
    kernels = _run("compiled.py")

    assert {name.split("-")[0] for name in kernels} == {"sm80", "sm90", "sm100"}
    for name, kernel in kernels.items():
        assert kernel["scratch"] == kernel["shared_bytes"] == 0, name
        assert kernel["threads"] <= 1024, name
        # A read behind a write would leave one access in flight where there could be many.
        assert kernel["loads_after_a_store"] == 0, name
        assert kernel["widest"] == (16 if name.endswith("aligned") else 1), name
