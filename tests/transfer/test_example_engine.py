"""The example of a third party's engine installs, passes the contract, and is found by kvarena."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent / "example_engine"

PROGRAM = """
from kvarena.hooks import TransferConfig, create_manager
manager = create_manager()
manager.load_entry_points()
answers = manager.hook.kvarena_transfer_engines(config=TransferConfig(engines=["socket"]))
engines = [engine for answer in answers for engine in answer]
print([engine.name for engine in engines])
"""

SOME = "overlap_is_refused or all_or_nothing or empty_region or written_pages"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "example"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


def run(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_its_own_tests_pass_with_nothing_configured(site: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    result = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed[1]) > 30
    assert "skipped" not in result.stdout


def test_kvarena_finds_it_by_its_name(site: Path, tmp_path: Path) -> None:
    result = run(site, "-c", PROGRAM, cwd=tmp_path)
    assert result.stdout.strip() == "['socket']", result.stderr


def test_an_engine_that_breaks_the_contract_is_told_so(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_sloppy.py").write_text(
        "from kvarena.transfer.testing import Standalone, TransferEngineContract\n"
        "from kvarena_example_engine import SocketEngine\n"
        "class Sloppy(SocketEngine):\n"
        "    def register(self, regions):\n"
        "        self._regions.update({region.address: region for region in regions})\n"
        "class TestSloppy(TransferEngineContract):\n"
        "    engine_factory = Standalone(Sloppy)\n"
        "    in_process = True\n"
    )
    result = run(
        site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SOME, "test_sloppy.py", cwd=tmp_path
    )
    assert result.returncode == 1
    failed = set(re.findall(r"^FAILED .*::(\w+)", result.stdout, re.MULTILINE))
    assert {
        "test_an_overlap_is_refused_and_the_first_region_stays",
        "test_one_call_registers_all_or_nothing",
        "test_an_empty_region_is_refused",
    } <= failed
    assert "test_written_pages_arrive_and_no_other_byte_changes" not in failed
