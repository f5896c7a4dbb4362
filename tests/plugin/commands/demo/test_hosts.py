"""Two hosts: a link that is lost for a moment, for good, and what is left when the run is broken off."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvarena.plugin.commands.cli import EXIT_BAD_INPUT, main
from kvarena.plugin.commands.demo import hosts as demo_hosts
from kvarena.plugin.commands.demo.hosts import HostsError, TwoHosts
from kvarena.plugin.commands.demo.run import Demo
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.plugin.engines.embedded.worker import Role

TIMEOUT_S = 4.0


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith("kvarena-")]


@pytest.fixture(scope="module")
def two_hosts() -> None:
    """Skip where there can be none; CI runs as root, and must not skip."""
    try:
        with TwoHosts():
            pass
    except HostsError as error:
        if os.environ.get("CI") and os.geteuid() == 0 and shutil.which("ip"):
            raise
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.usefixtures("two_hosts")
def test_the_pair_recovers_from_a_lost_link(make_demo: Callable[..., Demo], requests: list[Request]) -> None:
    with TwoHosts(cut_s=1.0) as hosts:
        names = set(hosts.names.values())
        assert names <= set(_namespaces())
        demo = make_demo(requests, hosts=hosts)
        report = demo.run()

    assert report.problems == []
    assert all(request.equal for request in report.requests)
    assert report.hosts is not None
    assert report.hosts.cut_s >= 1.0
    assert report.hosts.moved_after > 0
    assert report.hosts.moved_before + report.hosts.moved_after == len(requests)
    assert not names & set(_namespaces())
    assert {process.returncode for process in demo.processes.values()} == {0}


@pytest.mark.usefixtures("two_hosts")
def test_a_link_that_stays_down_is_reported_within_the_timeout(
    make_demo: Callable[..., Demo], endless: list[Request]
) -> None:
    moved: list[Role] = []
    stopped: dict[Role, control.Stopped] = {}

    def watch(role: Role, message: control.Message) -> None:
        if isinstance(message, control.Progress) and message.moved:
            moved.append(role)
        if isinstance(message, control.Stopped):
            stopped[role] = message

    with TwoHosts(cut_s=600.0) as hosts:
        names = set(hosts.names.values())
        demo = make_demo(endless, timeout=TIMEOUT_S, hosts=hosts, on_event=watch)
        report = demo.run()

    assert not report.ok
    assert moved
    assert any("worker is lost" in message.error for message in stopped.values())
    for role in ("prefill", "decode"):
        message = stopped[role]
        # Who notices first ends the run: the other may have been told to stop before it could notice.
        assert not message.error or "worker is lost" in message.error
        assert message.pool["problems"] == []
        capacities = message.pool["capacities"]
        assert capacities["full_available_size"] == capacities["size_full"]
    assert not names & set(_namespaces())
    assert all(process.returncode is not None for process in demo.processes.values())


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_broken_off_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvarena.plugin.commands.cli", "demo", "--hosts", "2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # A process group of its own: Ctrl-C reaches the workers, too.
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        while len(_children(process.pid)) < 2:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        workers = _children(process.pid)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 128 + number
    assert b"Traceback" not in errors
    assert not [name for name in _namespaces() if f"-{process.pid}-" in name]
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("two_hosts")
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    # No process can have this number: pid_max is below it.
    name = f"kvarena-{1 << 23}-prefill"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with TwoHosts():
            assert name not in _namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.usefixtures("two_hosts")
def test_a_failure_in_the_middle_of_the_setup_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _namespaces()
    run = demo_hosts._ip

    def fail(*arguments: str) -> str:
        if "address" in arguments:
            raise HostsError("injected")
        return run(*arguments)

    monkeypatch.setattr(demo_hosts, "_ip", fail)
    with pytest.raises(HostsError, match="injected"), TwoHosts():
        raise AssertionError("it was entered")
    assert _namespaces() == before


def test_not_root(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["demo", "--hosts", "2", "--json"]) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert "needs root" in err


def test_no_iproute2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert main(["demo", "--hosts", "2", "--json"]) == EXIT_BAD_INPUT
    assert "apt-get install iproute2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--transfer", "same-host"), "--hosts 2 is about Mooncake"),
        (("--port", "5555"), "--port is of no use"),
    ],
)
def test_options_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], more: tuple[str, str], said: str
) -> None:
    assert main(["demo", "--hosts", "2", "--json", *more]) == EXIT_BAD_INPUT
    assert said in capsys.readouterr().err


def _children(pid: int) -> list[int]:
    """Workers that a demo process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, ValueError, IndexError):
                continue
            if parent == pid and b"embedded.worker" in command:
                found.append(int(entry.name))
    return found
