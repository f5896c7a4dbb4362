"""Every command of the README and the pages is run, or is named here with the reason why not."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, Command, commands
from kvarena.plugin.commands.cli import COMMANDS
from kvarena.plugin.config import PREFIX, load_settings

#: Commands that are not run here, by a pattern, and why.
NOT_RUN = {
    r"make (demo|test|check|docs|contract)$": "sets up a virtual environment; .ci/run runs them",
    r"\.ci/run$": "runs this test",
    r"(\S*/)?pip (un)?install |apt-get install ": "changes the machine",
    r".*python -m sglang(\.|_)": "needs SGLang and a GPU; its settings are checked",
    r"kvarena doctor .*--sglang-args|.*kvarena doctor --sglang-args": "needs SGLang; it is parsed",
    r"KVARENA_TRANSFER=socket |.*--transfer socket": "needs the example engine (test_example_engine)",
    r"cd tests/transfer/example_engine$|pytest tests$": "test_example_engine does it in a copy",
    r"(PYTHONPATH=\S+ )?(python -m )?pytest .*gpu": "needs a GPU",
    r"python bench/": "measures for minutes",
}
#: Pages whose commands another test runs.
ELSEWHERE = {"docs/plan.md": "tests/plugin/commands/plan/test_command.py"}

#: The environment that lines for other programs set.
OTHERS = ("MC_", "SGLANG_", "MOONCAKE_", "UCX_", "CUDA_", "PYTHONPATH")

ALL = [command for page in PAGES for command in commands(page)]
RUN = [each for each in ALL if not any(re.match(pattern, each.text) for pattern in NOT_RUN)]
# A line that several pages have is run once.
RUN = list({each.text: each for each in reversed(RUN) if each.page not in ELSEWHERE}.values())


def split(command: Command) -> tuple[dict[str, str], list[str]]:
    """The variables that a line sets, and its words."""
    words = shlex.split(command.text)
    count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def parser() -> argparse.ArgumentParser:
    """What the ``kvarena`` command reads its arguments with."""
    top = argparse.ArgumentParser(prog="kvarena")
    subparsers = top.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        importlib.import_module(f"kvarena.plugin.commands.{name}").add_parser(subparsers)
    return top


def test_there_are_commands_and_every_reason_is_used() -> None:
    assert len(ALL) > 40
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, each.text) for each in ALL)]
    assert set(unused) <= {r"\.ci/run$", r"python bench/", r"(PYTHONPATH=\S+ )?(python -m )?pytest .*gpu"}
    for page, test in ELSEWHERE.items():
        assert page.rpartition("/")[2] in (ROOT / test).read_text()


@pytest.mark.parametrize("command", ALL, ids=str)
def test_arguments_and_settings_are_real(command: Command, place: Path) -> None:
    environ, words = split(command)
    ours = {name: value for name, value in environ.items() if not name.startswith(OTHERS)}
    if "KVARENA_CONFIG" in ours:
        ours["KVARENA_CONFIG"] = str(place / ours["KVARENA_CONFIG"])
    settings = load_settings(ours)
    for name in ours.keys() - {"KVARENA_CONFIG"}:
        assert getattr(settings, name[len(PREFIX) :].lower()) is not None
    if not words or words[0].rpartition("/")[2] != "kvarena":
        return
    if "--help" not in words:
        assert parser().parse_args(words[1:]).command == words[1]


@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_does_what_the_page_says(
    command: Command,
    place: Path,
    living: int,
    kvarena: Callable[[list[str]], tuple[int, str]],
    ended: Callable[[str], tuple[int, str, str]],
    scraped: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ, words = split(command)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    program = words[0].rpartition("/")[2]
    if program == "curl":
        served = shlex.split(command.text.replace("9400", str(living)))
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        answer = subprocess.run(served, capture_output=True, text=True, timeout=30, check=True)
        assert re.search(r"kvarena_backed_bytes\{.*\} 2\.0", answer.stdout)
        return
    assert program == "kvarena", f"{command}: nobody knows how to run it; say how in tests/docs, or why not"
    what, arguments = words[1], words[1:]
    if "--help" in arguments:
        status, out = kvarena(arguments)
        assert status == 0
        assert out.startswith("usage: kvarena")
    elif what == "demo":
        # One run for all of them; they differ in what moves the pages and in what is printed.
        status, out, err = ended("demo")
        assert status == 0, out + err
        assert json.loads(out)["ok"]
        assert (place / "arena.png").read_bytes()[:4] == b"\x89PNG"
        first = min(scraped)
        assert {first, first + 1} <= set(scraped)
        assert re.search(r"kvarena_finalize_seconds_count\{.*role=\"prefill\"\} 1\.0", scraped[first])
    elif what == "doctor":
        quick = [] if "--quick" in arguments else ["--quick"]  # moving memory has tests of its own
        status, out = kvarena([*arguments, *quick])
        assert status == 0, out
        assert out.rstrip().endswith("ready")
    elif what == "status" and "--watch" in arguments:
        assert "decode" in _watched(arguments, place)
    elif what == "status":
        # The page's process number stands for whichever runs: here it is this one.
        status, out = kvarena([str(os.getpid()) if word == "4711" else word for word in arguments])
        assert status == 0, out
        assert "decode" in out
        if "--plot" in arguments:
            assert (place / "status.png").read_bytes()[:4] == b"\x89PNG"
    else:
        status, out = kvarena(arguments)
        assert status == 0, out


def _watched(arguments: list[str], place: Path) -> str:
    """Until the second picture, then Ctrl-C."""
    code = "import sys; from kvarena.plugin.commands.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, *arguments], cwd=place, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if said.count("swa") == 1:
                process.send_signal(signal.SIGINT)
                break
        process.communicate(timeout=30)
        assert process.returncode == 0
    return said
