"""A worker that dies in the middle: the other one says so, frees its pages, and ends with status 1."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from kvarena.plugin.demo_run import Demo
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.plugin.engines.embedded.worker import EXIT_FAILED, Role

TIMEOUT_S = 4.0


@pytest.mark.parametrize(
    ("victim", "survivor", "how"),
    [
        ("prefill", "decode", signal.SIGKILL),
        ("decode", "prefill", signal.SIGKILL),
        # One that hangs is as lost as one that is dead.
        ("prefill", "decode", signal.SIGSTOP),
    ],
)
def test_the_survivor_reports_and_frees(
    make_demo: Callable[..., Demo],
    requests: list[Request],
    victim: Role,
    survivor: Role,
    how: signal.Signals,
) -> None:
    long = [Request(rid, requests[-1].tokens, 32) for rid in range(8)]
    died: list[float] = []
    stopped: dict[Role, tuple[float, control.Stopped]] = {}

    def watch(role: Role, message: control.Message) -> None:
        # In the middle: the first prompt has moved, others are on their way.
        if isinstance(message, control.Progress) and "pages moved" in message.what and not died:
            os.kill(demo.processes[victim].pid, how)
            died.append(time.monotonic())
        if isinstance(message, control.Stopped):
            stopped[role] = (time.monotonic(), message)

    demo = make_demo(long, timeout=TIMEOUT_S, on_event=watch)
    report = demo.run()

    assert died
    assert not report.ok
    assert any(f"{survivor}: a {victim} worker is lost" in p or "worker is lost" in p for p in report.problems)
    when, last = stopped[survivor]
    assert "lost" in last.error
    assert last.pool["problems"] == []
    capacities = last.pool["capacities"]
    assert capacities["full_available_size"] == capacities["size_full"]
    assert capacities["swa_available_size"] == capacities["size_swa"]
    assert demo.processes[survivor].returncode == EXIT_FAILED
    assert all(process.returncode is not None for process in demo.processes.values())
    del when
