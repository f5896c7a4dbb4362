"""A worker that dies in the middle: the other one says so, frees its pages, and ends with status 1."""

from __future__ import annotations

import os
import signal
import stat
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
