"""Commands whose output has nowhere to go, or goes where not every character can: never a traceback."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from kvarena.plugin.commands import cli

KVARENA = [sys.executable, "-m", "kvarena.plugin.commands.cli"]
#: Through rich, and through a plain write.
COMMANDS = (
    ["plan", "--full-layers", "4", "--kv-heads", "8", "--head-dim", "128"],
    ["status"],
    ["status", "--json"],
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVARENA_")}
    return kept | {"KVARENA_SOCKET_DIR": str(tmp_path / "run")}


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_is_no_verdict(arguments: list[str], environ: dict[str, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*KVARENA, *arguments], stdout=writing, stderr=subprocess.PIPE, env=environ, timeout=60
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_disk_is_said(arguments: list[str], environ: dict[str, str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*KVARENA, *arguments], stdout=full, stderr=subprocess.PIPE, env=environ, timeout=60, text=True
        )
    said = f"kvarena {arguments[0]}: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_closed_output_is_a_void(arguments: list[str], environ: dict[str, str]) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {shlex.join([*KVARENA, *arguments])} >&-"],
        stderr=subprocess.PIPE,
        env=environ,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_error_output_changes_no_exit_status(environ: dict[str, str], tmp_path: Path) -> None:
    tmp_path.joinpath("run").mkdir(mode=0o755)  # open to others
    command = f"exec {shlex.join([*KVARENA, 'status'])} 2>&-"
    assert subprocess.run(["sh", "-c", command], env=environ, timeout=60).returncode == 2


def test_what_an_encoding_lacks_is_replaced(environ: dict[str, str]) -> None:
    done = subprocess.run(
        [*KVARENA, *COMMANDS[1]],
        capture_output=True,
        env=environ | {"PYTHONIOENCODING": "ascii", "KVARENA_SOCKET_DIR": "/nowhere/é"},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"looked in /nowhere/?" in done.stdout


def test_a_path_that_is_no_text_is_in_the_json(environ: dict[str, str]) -> None:
    del environ["KVARENA_SOCKET_DIR"]
    done = subprocess.run(
        [*KVARENA, "status", "--json"],
        capture_output=True,
        env={**{os.fsencode(k): os.fsencode(v) for k, v in environ.items()}, b"XDG_RUNTIME_DIR": b"/no/\xff"},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert os.fsencode(json.loads(done.stdout)["directory"]) == b"/no/\xff/kvarena"


def test_the_version_is_told() -> None:
    done = subprocess.run([*KVARENA, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.startswith("kvarena 0.")) == (0, True)


def test_a_checkout_that_is_not_installed_runs_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPU hosts run one; there the command ended before it began."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "kvarena (a checkout that is not installed)\n"
