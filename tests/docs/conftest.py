"""What the tests of the documentation share: one place to run commands in, one demo, one living process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest

# Here, for every test of this folder.
sys.path.append(str(Path(__file__).parent / "support"))

from doc_pages import ROOT, blocks

Run = Callable[[list[str]], tuple[int, str]]

#: A demo that is as short as one can be; what is asked for on the pages comes first.
_SHORT = ("--requests", "1", "--max-new-tokens", "4", "--input", "short.txt", "--json")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages take for granted: a model's configuration, the settings file."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "short.txt").write_text("One page moved is worth two that were computed again.\n" * 4)
    config = ROOT / "tests" / "plugin" / "commands" / "plan" / "data" / "configs" / "gpt-oss-20b.json"
    (folder / "config.json").write_bytes(config.read_bytes())
    for block in blocks(ROOT / "docs" / "operator.md"):
        if block.text.startswith("# kvarena.toml"):
            (folder / "kvarena.toml").write_text(block.text)
    (folder / "sockets").mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="session")
def scraped() -> dict[int, str]:
    """The metrics of the demo's processes while it ran, by port: prefill, decode, reference."""
    return {}


@pytest.fixture(scope="session")
def background(place: Path, scraped: dict[int, str]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The demo and the programs of the pages, all at once: each has several processes that mostly wait."""
    kvarena = Path(sysconfig.get_path("scripts")) / "kvarena"
    demo = [str(kvarena), "demo", "--transfer", "same-host", "--grow", "1", "--plot", "arena.png", *_SHORT]
    arguments = {"demo": demo}
    page = ROOT / "docs" / "engines" / "embedded.md"
    for title in ("engine.py", "watcher.py", "client.py"):
        (place / title).write_text("\n".join(each.text for each in blocks(page) if each.title == title))
        arguments[title] = [sys.executable, title]
    environ = os.environ | {"KVARENA_SOCKET_DIR": str(place / "sockets"), "OMP_NUM_THREADS": "1"}
    first_port = _free_ports(3)
    environ |= {"KVARENA_METRICS_PORT": str(first_port)}
    running = {
        name: subprocess.Popen(
            command, cwd=place, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name, command in arguments.items()
    }
    ports = range(first_port, first_port + 3)
    threading.Thread(target=_scrape, args=(ports, running["demo"], scraped), daemon=True).start()
    yield running
    for process in running.values():
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=20)


@pytest.fixture(scope="session")
def ended(background: dict[str, subprocess.Popen[str]]) -> Callable[[str], tuple[int, str, str]]:
    """Status, standard output and standard error of a program of the background."""
    answers: dict[str, tuple[int, str, str]] = {}

    def wait(name: str) -> tuple[int, str, str]:
        if name not in answers:
            out, err = background[name].communicate(timeout=110)
            answers[name] = background[name].returncode, out, err
        return answers[name]

    return wait


@pytest.fixture
def kvarena(place: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a ``kvarena`` command in this process; its exit status and all that it printed."""
    from kvarena.plugin.commands.cli import main

    monkeypatch.chdir(place)
    monkeypatch.setenv("KVARENA_SOCKET_DIR", str(place / "sockets"))
    monkeypatch.setenv("COLUMNS", "120")

    def run(arguments: list[str]) -> tuple[int, str]:
        said = StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                status = main(arguments)
            except SystemExit as ending:
                status = int(ending.code or 0)
        return status, said.getvalue()

    return run


@pytest.fixture(scope="module")
def living(place: Path) -> Iterator[int]:
    """A process that serves: this one, with a small pool. Answers the port of its metrics."""
    import torch
    from kvarena.plugin.config import Settings
    from kvarena.plugin.lifecycle import PoolLifecycle
    from kvarena.pool import MHASubPoolSpec, UnifiedSWATokenToKVPoolAllocator, resize_for

    settings = Settings(
        memory_limit=4 << 20,
        transfer=("same-host",),
        socket_dir=str(place / "sockets"),
        metrics_port=0,
        load_plugins=False,
    )
    specs = [
        MHASubPoolSpec(name, direction, layer_num=2, head_num=2, head_dim=16, dtype=torch.float32)
        for name, direction in (("full", "up"), ("swa", "down"))
    ]
    life = PoolLifecycle(settings, device="cpu", name="decode")
    life.reserve(specs, total_bytes=2 << 20, page_size=16)
    allocator = UnifiedSWATokenToKVPoolAllocator(life.pool)
    life.finalize(resize_for(life.pool, life.budget()), allocator)
    deadline = time.monotonic() + 10
    while not list((place / "sockets").glob(f"{os.getpid()}-*.status.json")):
        assert time.monotonic() < deadline, "no status file was written"
        time.sleep(0.02)
    assert life.reporter.metrics_address is not None
    yield int(life.reporter.metrics_address.rpartition(":")[2])
    life.close()


def _scrape(ports: range, process: subprocess.Popen[str], answers: dict[int, str]) -> None:
    while process.poll() is None:
        for port in ports:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    # A process that ends while it answers says nothing.
                    answers[port] = answer.read().decode() or answers.get(port, "")
            except OSError:
                continue  # not serving yet, or no longer
        time.sleep(0.1)


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row.

    They lie below those that Linux gives to connections (32768 and on): of these, any process of the tests
    may have been given one before the demo comes to listen there.
    """
    while True:
        first = random.randrange(20_000, 32_768 - count)
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
