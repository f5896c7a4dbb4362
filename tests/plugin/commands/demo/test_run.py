"""A whole run: three processes, pages over Mooncake's TCP, and what the report must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from kvarena.plugin.commands.demo.run import Demo
from kvarena.plugin.commands.demo.verdict import DemoReport
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.plugin.engines.embedded.worker import Role

GRANULE = 4096
Said = list[tuple[Role, control.Message]]


@pytest.fixture(scope="module")
def finished(make_demo: Callable[..., Demo], requests: list[Request]) -> tuple[DemoReport, Said, Demo]:
    said: Said = []
    demo = make_demo(requests, on_event=lambda role, message: said.append((role, message)))
    return demo.run(), said, demo


@pytest.fixture(scope="module")
def report(finished: tuple[DemoReport, Said, Demo]) -> DemoReport:
    return finished[0]


def _stages(report: DemoReport, role: str) -> dict[str, dict[str, Any]]:
    """The last event of each name."""
    return {event["name"]: event for event in report.processes[role]["timeline"]}


def test_the_tokens_are_equal_and_nothing_is_wrong(report: DemoReport, requests: list[Request]) -> None:
    assert report.problems == []
    assert report.ok
    assert [request.equal for request in report.requests] == [True] * len(requests)
    assert all(request.tokens for request in report.requests)


def test_equal_tokens_are_no_luck(report: DemoReport) -> None:
    assert report.min_margin is not None
    assert report.largest_noise is not None
    assert report.min_margin > 10 * report.largest_noise


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_timeline_is_complete_and_in_order(report: DemoReport, role: str) -> None:
    names = [event["name"] for event in report.processes[role]["timeline"]]
    assert names == ["reserved", "sink", "registered", "captured", "budget", "finalized", "registered"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_registered_follows_backed(report: DemoReport, role: str) -> None:
    timeline = report.processes[role]["timeline"]
    sink = timeline[1]["nbytes"]
    stages = _stages(report, role)
    assert timeline[2]["nbytes"] == sink
    # Memory comes in whole granules, and all of what has memory is registered.
    registered = stages["registered"]["nbytes"]
    assert sink < stages["finalized"]["nbytes"] <= registered < stages["finalized"]["nbytes"] + GRANULE
    assert stages["finalized"]["nbytes"] < stages["reserved"]["nbytes"]
    assert len({event["address"] for event in timeline if event["address"]}) == 1
    assert report.processes[role]["handles"] == 1


def test_the_reference_has_an_eager_pool_and_no_transfer_engine(report: DemoReport) -> None:
    assert [event["name"] for event in report.processes["reference"]["timeline"]][:2] == ["eager", "backed"]
    assert report.processes["reference"]["transfer"] == []
    assert report.processes["decode"]["transfer"] == ["mooncake"]
    assert report.processes["reference"]["capacities"] == report.processes["decode"]["capacities"]


def test_requests_were_decoded_together(report: DemoReport) -> None:
    assert report.processes["decode"]["widest_batch"] > 1


def test_every_request_moved_its_pages(
    finished: tuple[DemoReport, Said, Demo], requests: list[Request]
) -> None:
    moved = [m.what for role, m in finished[1] if isinstance(m, control.Progress) and "pages moved" in m.what]
    assert len(moved) == len(requests)
    # 201 tokens are 26 pages of 8; the next token sees 20, which lie in the last 4.
    longest = next(what for what in moved if what.startswith("request 4:"))
    assert "26 full + 4 swa pages" in longest


def test_no_process_is_left(finished: tuple[DemoReport, Said, Demo]) -> None:
    assert {process.returncode for process in finished[2].processes.values()} == {0}


def test_the_report_survives_json(report: DemoReport) -> None:
    assert msgspec.json.decode(msgspec.json.encode(report), type=DemoReport) == report
