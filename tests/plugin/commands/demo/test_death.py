"""A worker that dies in the middle: the other one says so, frees its pages, and ends with status 1."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvarena.plugin.commands.demo.run import Demo
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.plugin.engines.embedded.worker import EXIT_FAILED, Role

TIMEOUT_S = 4.0


@pytest.mark.parametrize(
    ("victim", "survivor"),
    [
        ("prefill", "decode"),
        ("decode", "prefill"),
    ],
)
def test_the_survivor_reports_and_frees(
    make_demo: Callable[..., Demo],
    endless: list[Request],
    victim: Role,
    survivor: Role,
) -> None:
    died: list[Role] = []
    stopped: dict[Role, control.Stopped] = {}

    def watch(role: Role, message: control.Message) -> None:
        # In the middle: the first prompt has moved, others are on their way.
        if isinstance(message, control.Progress) and "pages moved" in message.what and not died:
            os.kill(demo.processes[victim].pid, signal.SIGKILL)
            died.append(victim)
        if isinstance(message, control.Stopped):
            stopped[role] = message

    demo = make_demo(endless, timeout=TIMEOUT_S, on_event=watch)
    report = demo.run()

    assert died
    assert not report.ok
    last = stopped[survivor]
    assert f"{victim} worker is lost" in last.error
    assert f"{survivor}: {last.error}" in report.problems
    assert f"{victim}: it was killed by signal 9." in report.problems
    assert last.pool["problems"] == []
    capacities = last.pool["capacities"]
    assert capacities["full_available_size"] == capacities["size_full"]
    assert capacities["swa_available_size"] == capacities["size_swa"]
    assert demo.processes[survivor].returncode == EXIT_FAILED
    assert all(process.returncode is not None for process in demo.processes.values())


def test_a_run_that_is_broken_off_takes_everything_down(
    make_demo: Callable[..., Demo], requests: list[Request], tmp_path: Path
) -> None:
    os.chmod(tmp_path, stat.S_IRWXU)

    def interrupt(role: Role, message: control.Message) -> None:
        # In the middle: a prompt has moved, the reference imports torch.
        if isinstance(message, control.Progress) and message.moved:
            raise KeyboardInterrupt

    demo = make_demo(requests, transfer="same-host", socket_dir=str(tmp_path), on_event=interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.run()
    # They ended by themselves, and orderly: no socket and no status file is left.
    assert {process.returncode for process in demo.processes.values()} <= {EXIT_FAILED, -signal.SIGTERM}
    assert demo.processes["prefill"].returncode == EXIT_FAILED
    assert demo.processes["decode"].returncode == EXIT_FAILED
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.is_socket()] == []


@pytest.mark.parametrize("transfer", ["mooncake", "same-host"])
def test_a_pair_that_is_paused_together_goes_on(
    make_demo: Callable[..., Demo], requests: list[Request], tmp_path: Path, transfer: str
) -> None:
    os.chmod(tmp_path, stat.S_IRWXU)
    paused: list[int] = []

    def watch(role: Role, message: control.Message) -> None:
        # As a snapshot of their machine does, longer than a silent peer is waited for (4.5 s).
        if isinstance(message, control.Progress) and message.moved and not paused:
            paused.extend(demo.processes[each].pid for each in ("prefill", "decode"))
            for pid in paused:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(6.5)
            for pid in paused:
                os.kill(pid, signal.SIGCONT)

    demo = make_demo(requests, timeout=6.0, transfer=transfer, socket_dir=str(tmp_path), on_event=watch)
    report = demo.run()
    assert paused
    assert report.problems == []
    assert report.ok


def test_sigint_ends_a_run_within_two_seconds_though_a_worker_hangs(tmp_path: Path) -> None:
    os.chmod(tmp_path, stat.S_IRWXU)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvarena.plugin.commands.cli", "demo", "--json", "--transfer", "same-host"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "KVARENA_SOCKET_DIR": str(tmp_path)},
    )
    try:
        end = time.monotonic() + 90
        while len(workers := _children(process.pid)) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        took = time.monotonic() - began
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert took < 2.0 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    assert took < 10.0
    assert b"Traceback" not in errors
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
        except OSError:
            continue
    return found
