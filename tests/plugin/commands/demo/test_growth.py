"""Every engine gives the reference's tokens, while both pools grow and give back under its transfers."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from kvarena.plugin.commands.demo.run import Demo
from kvarena.plugin.commands.demo.verdict import DemoReport
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.plugin.engines.embedded.worker import Role

CYCLES = 3
STEP = 256 << 10
PAIR = ("prefill", "decode")


class Run(NamedTuple):
    engine: str
    demo: Demo
    report: DemoReport
    resized: list[tuple[Role, control.Resized]]
    sockets: Path


@pytest.fixture(scope="module", params=["mooncake", "nixl", "same-host"])
def run(
    request: pytest.FixtureRequest,
    make_demo: Callable[..., Demo],
    requests: list[Request],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    sockets = tmp_path_factory.mktemp("sockets")
    os.chmod(sockets, stat.S_IRWXU)
    resized: list[tuple[Role, control.Resized]] = []

    def watch(role: Role, message: control.Message) -> None:
        if isinstance(message, control.Resized):
            resized.append((role, message))

    demo = make_demo(
        requests,
        transfer=request.param,
        socket_dir=str(sockets),
        headroom=STEP,
        reserved_bytes=1 << 20,
        timeout=20.0,
        growth=(CYCLES, STEP),
        on_event=watch,
    )
    return Run(request.param, demo, demo.run(), resized, sockets)


def test_tokens_are_the_references(run: Run, requests: list[Request]) -> None:
    assert run.report.problems == []
    assert [request.equal for request in run.report.requests] == [True] * len(requests)
    assert run.report.processes["prefill"]["transfer"] == [run.engine]


def test_every_change_was_made_under_traffic(run: Run) -> None:
    growth = run.report.growth
    assert growth is not None
    assert growth.cycles == CYCLES
    # Pages were on their way at the moments of change, and prompts moved between any two.
    assert growth.in_flight > 0
    assert len(run.report.requests) + growth.served_again > 2 * CYCLES
    for role in PAIR:
        made = [message for of, message in run.resized if of == role]
        assert [message.grown for message in made] == [True, False] * CYCLES
        assert [message.error for message in made] == [""] * (2 * CYCLES)
        small, large = made[1].total_bytes, made[0].total_bytes
        assert large == small + STEP
        assert {message.total_bytes for message in made} == {small, large}


def test_no_transfer_was_refused(run: Run) -> None:
    prefill = run.report.processes["prefill"]
    assert prefill["transfers"][run.engine]["failed"] == 0
    assert prefill["transfers"][run.engine]["submitted"] >= 2 * len(run.report.requests)
    assert prefill["resent"] == 0


@pytest.mark.parametrize("role", PAIR)
def test_registration_followed_each_change(run: Run, role: str) -> None:
    timeline = run.report.processes[role]["timeline"]
    stages = [event["name"] for event in timeline][7:]
    # Memory is there before it is registered, and is unregistered before it goes.
    assert stages == ["grown", "registered", "registered", "shrunk"] * CYCLES
    sizes: dict[str, set[int]] = {event["name"]: set() for event in timeline}
    for event in timeline[7:]:
        sizes[event["name"]].add(event["nbytes"])
    base = next(event["nbytes"] for event in timeline if event["name"] == "finalized")
    assert sizes["grown"] == {base + STEP}
    assert sizes["shrunk"] == {base}
    assert sizes["registered"] == {base, base + STEP}
    assert run.report.processes[role]["handles"] == 1


def test_nothing_is_left(run: Run) -> None:
    assert {process.returncode for process in run.demo.processes.values()} == {0}
    assert [path.name for path in run.sockets.iterdir() if path.suffix == ".sock"] == []
