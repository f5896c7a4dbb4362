"""``kvarena status`` as a user meets it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvarena.plugin.commands.cli import main
from kvarena.plugin.commands.status.view import render
from kvarena.plugin.observe.status.files import Found
from rich.console import Console

MIB = 1 << 20


@pytest.fixture(autouse=True)
def here(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARENA_SOCKET_DIR", str(directory))


@pytest.fixture
def serving(serve: Any, directory: Path) -> Any:
    served = serve("decode", transfer=("mooncake",))
    served.finalize(4 * MIB)
    served.allocator.alloc(5 * 16)
    served.lifecycle.reporter._file.write(served.lifecycle.reporter.status())
    return served


def test_nobody_runs(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    assert main(["status"]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "No kvarena process is running" in said
    assert str(directory) in said
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["processes"] == []


def test_a_process_in_words(serving: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "decode" in said
    assert "reserved 8.00 MiB, backed 4.00 MiB by 1 handle" in said
    assert f"{serving.allocator.size_full:,} tokens" in said
    assert "mooncake: 4.00 MiB registered (1 region, epoch 3)" in said
    full = next(line for line in said.splitlines() if "full" in line)
    assert f"80 of {serving.allocator.size_full:,} tokens" in full
    assert all(len(line) <= 80 for line in said.splitlines())


def test_another_number_does_not_say_that_nobody_runs(
    serving: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["status", "--pid", "1"]) == 1
    assert "No kvarena process with the number 1 is running" in capsys.readouterr().out.replace("\n", " ")
    assert main(["status", "--pid", "1", "--plot", str(tmp_path / "x.png")]) == 2
    assert "no running kvarena process with the number 1" in capsys.readouterr().err.replace("\n", " ")
    assert main(["status", "--pid", str(os.getpid())]) == 0
    assert "decode" in capsys.readouterr().out


def test_json_has_the_figures_but_not_the_history(serving: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    (process,) = json.loads(capsys.readouterr().out)["processes"]
    assert (process["state"], process["name"]) == ("running", "decode")
    assert process["pool"]["backed_bytes"] == serving.pool.arena.backed_bytes
    assert process["pool"]["sub_pools"][0]["live_pages"] == 5
    assert "history" not in process


def test_one_process_of_several(serving: Any, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pid = serving.lifecycle.reporter.status().identity.pid
    assert main(["status", "--pid", str(pid)]) == 0
    assert "decode" in capsys.readouterr().out
    assert main(["status", "--pid", "1"]) == 1
    assert "No kvarena process" in capsys.readouterr().out


@pytest.mark.parametrize(("age", "said"), [(9.0, False), (12.0, True)])
def test_a_process_that_hangs_is_called_silent(serving: Any, directory: Path, age: float, said: bool) -> None:
    status = serving.lifecycle.reporter.status()
    found = Found(directory, "running", msgspec.structs.replace(status, written_at=time.time() - age))
    console = Console(width=120, file=io.StringIO())
    console.print(render([found], directory))
    assert (f"silent for {age:.0f} s" in console.file.getvalue()) == said  # type: ignore[attr-defined]


def test_a_forged_file_is_named_beside_the_others(
    serving: Any, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "7-0.status.json").write_text("{}")
    assert main(["status"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot be read" in said
    assert "decode" in said


def test_plot(serving: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["status", "--plot", str(tmp_path / "arena.svg")]) == 0
    assert "decode: 8 MiB reserved" in (tmp_path / "arena.svg").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'arena.svg'}: decode\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--plot", "arena.png"], "nothing to draw"),
        (["--plot", ""], "the name of the picture is empty"),
        (["--watch", "0"], "no number of seconds"),
        (["--watch", "soon"], "no number of seconds"),
        (["--pid", "x"], "invalid int"),
    ],
)
def test_bad_input(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["status", *arguments])
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    assert why in capsys.readouterr().err


def test_a_directory_open_to_others_is_bad_input(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory.mkdir(mode=0o755)
    assert main(["status"]) == 2
    assert f"chmod 0700 {directory}" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="these directories are root's")
@pytest.mark.parametrize("shared", ["/tmp", "/etc"])
def test_root_is_not_told_to_close_a_directory_that_others_need(
    shared: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVARENA_SOCKET_DIR", shared)
    assert main(["status"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "chmod" not in said
    assert "Set KVARENA_SOCKET_DIR to a directory of your own" in said


@pytest.mark.parametrize("extra", [[], ["--json"]], ids=["text", "json"])
def test_watch_repeats_until_interrupted(serving: Any, extra: list[str]) -> None:
    watcher = subprocess.Popen(
        [sys.executable, "-u", "-m", "kvarena.plugin.commands.cli", "status", "--watch", "0.1", *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watcher.stdout is not None
        seen = 0
        deadline = time.monotonic() + 60
        while seen < 2 and time.monotonic() < deadline:
            seen += "decode" in watcher.stdout.readline()
        watcher.send_signal(signal.SIGINT)
        _, errors = watcher.communicate(timeout=60)
    finally:
        watcher.kill()
        watcher.communicate()
    assert (watcher.returncode, errors) == (0, "")
    assert seen == 2
