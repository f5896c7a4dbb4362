"""Whatever would end a start, the doctor finds first."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvarena.plugin.commands.doctor.start import examine_gpu_processes, examine_start, examine_version
from kvarena.plugin.config import Settings

SMI = """#!/bin/sh
[ "$2" = 1 ] || exit 6
echo '4711, 1024, python'
printf '4712, [N/A], /bin/e\\033vil\\n'
"""


def _broken(**settings: object) -> list[str]:
    found = examine_start(Settings(load_plugins=False, **settings))  # type: ignore[arg-type]
    return [f"{each.what} {each.fix}" for each in found if each.verdict == "broken"]


def test_the_defaults_start() -> None:
    assert _broken() == []


def test_an_unknown_transfer_engine_is_refused_as_at_the_start() -> None:
    (said,) = _broken(transfer=("pigeon",))
    assert "no plugin provides the transfer engine pigeon" in said


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "é..b"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    (said,) = _broken(transfer_host=host)
    assert "is not an address of this machine" in said


def test_a_taken_metrics_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (said,) = _broken(metrics_port=taken.getsockname()[1])
    assert "in use" in said
    assert "KVARENA_METRICS_PORT" in said


@pytest.mark.parametrize("name", ["memory_limit", "pool_bytes"])
def test_zero_bytes_are_refused(name: str) -> None:
    (said,) = _broken(**{name: 0})
    assert f"KVARENA_{name.upper()}=0" in said


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_a_low_descriptor_limit_is_a_warning_that_names_it() -> None:
    (found,) = examine_start(Settings(load_plugins=False))
    assert found.verdict == "warning"
    assert "RLIMIT_NOFILE lets a process open 300 files" in found.what
    assert "ulimit -n" in found.fix


def test_the_version_is_named() -> None:
    assert examine_version().what.startswith("kvarena 0.")


def test_who_holds_a_gpus_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [each.what for each in examine_gpu_processes("cuda:1")] == [
        "pid 4711 (python) holds 1.00 GiB of this GPU's memory",
        "pid 4712 (/bin/e\\x1bvil) holds an unknown part of this GPU's memory",
    ]
    assert list(examine_gpu_processes("cuda:0")) == []
    assert list(examine_gpu_processes("cpu")) == []
