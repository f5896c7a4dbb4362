"""The example of a third party's engine installs, passes the contract, and is found by kvarena."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "example_engine"

PROGRAM = """
from kvarena.hooks import TransferConfig, create_manager
manager = create_manager()
manager.load_entry_points()
answers = manager.hook.kvarena_transfer_engines(config=TransferConfig(engines=["socket"]))
engines = [engine for answer in answers for engine in answer]
print([engine.name for engine in engines])
"""

LATE = """
import threading, time
from kvarena_example_engine import SocketEngine

class Late:
    def __init__(self, listener):
        self._listener = listener
        self.accepted = threading.Event()

    def accept(self):
        connection = self._listener.accept()
        self.accepted.set()
        time.sleep(0.5)  # close begins and ends its round of what is connected
        return connection

    def __getattr__(self, name):
        return getattr(self._listener, name)

source, first, target = SocketEngine(), SocketEngine(), SocketEngine()
target._listener = late = Late(target._listener)
first.connect(target.describe())  # the one that was being waited for when the listener was replaced
source.connect(target.describe())
assert late.accepted.wait(20)
closing = threading.Thread(target=target.close, daemon=True)
closing.start()
closing.join(20)
print("still closing" if closing.is_alive() else "closed")
first.close()
source.close()
"""

STUCK = """
import threading
from kvarena.transfer.testing import Standalone, TransferEngineContract
from kvarena_example_engine import SocketEngine

class Stuck(SocketEngine):
    def close(self):
        threading.Event().wait()

class TestStuck(TransferEngineContract):
    engine_factory = Standalone(Stuck)
    timeout = 2.0
    in_process = True
"""

SLOPPY = Path(__file__).parents[1] / "support" / "sloppy_engines.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "example"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


def run(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), *filter(None, [os.getenv("PYTHONPATH")])])
    # As in its author's CI, where pytest lays out whole differences: it once took minutes for 2 MiB of bytes.
    command, env = [sys.executable, *arguments], os.environ | {"PYTHONPATH": paths, "CI": "true"}
    try:
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110)
    except subprocess.TimeoutExpired as error:  # what it was at is the end of its output
        output = (error.output or b"").decode(errors="replace")
        pytest.fail(f"it did not end in {error.timeout:g} s:\n{output[-4000:]}")


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


def test_it_closes_though_a_peer_is_on_its_way_in(site: Path, tmp_path: Path) -> None:
    """It once waited for ever for a connection that it had accepted after it closed all others."""
    result = run(site, "-c", LATE, cwd=tmp_path)
    assert result.stdout.strip() == "closed", result.stderr


def test_an_engine_that_never_closes_is_an_error_and_no_hang(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_stuck.py").write_text(STUCK)
    result = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "empty_batch", cwd=tmp_path)
    assert "1 passed" in result.stdout, result.stdout + result.stderr
    assert "1 error" in result.stdout
    assert "socket: close() did not end within 2 s" in result.stdout


def test_an_engine_that_breaks_the_contract_is_told_so(site: Path, tmp_path: Path) -> None:
    """Each sloppy engine fails the test that its docstring names, and none of them fails this one."""
    shutil.copy(SLOPPY, tmp_path / "sloppy_engines.py")
    (tmp_path / "test_sloppy.py").write_text(
        "import sloppy_engines\n"
        "from kvarena.transfer.testing import Standalone, TransferEngineContract\n"
        "for engine in sloppy_engines.ALL:\n"
        "    here = engine is not sloppy_engines.Patient  # only its peer must be stopped\n"
        "    members = {'engine_factory': Standalone(engine), 'timeout': 2.0, 'in_process': here}\n"
        "    name = f'Test{engine.__name__}'\n"
        "    globals()[name] = type(name, (TransferEngineContract,), members)\n"
    )
    faults = dict(re.findall(r"class (\w+)\(SocketEngine\):\n    \"\"\"(\w+):", SLOPPY.read_text()))
    good = "test_an_empty_batch_ends_well"
    wanted = " or ".join([good, *(f"(Test{name} and {test})" for name, test in faults.items())])
    arguments = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-rA", "-k", wanted, "test_sloppy.py"]
    result = run(site, *arguments, cwd=tmp_path)
    outcomes = set(re.findall(r"^(FAILED|PASSED) .*::Test(\w+)::(\w+)", result.stdout, re.MULTILINE))
    assert {("FAILED", *fault) for fault in faults.items()} <= outcomes, result.stdout
    assert {("PASSED", name, good) for name in faults} <= outcomes
    assert len(faults) == 20
