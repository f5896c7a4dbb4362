"""What would end a start: each is tried with the code that the start runs."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.byte_sizes import MIB, format_bytes
from kvarena.plugin.commands.doctor.findings import Finding
from kvarena.plugin.commands.terminal import printable
from kvarena.plugin.config import Settings
from kvarena.plugin.version import kvarena_version

__all__ = ["examine_gpu_processes", "examine_start", "examine_version"]

_OURS: Final = frozenset({"mooncake", "nixl", "same-host"})
#: Of one pool: finalize makes one, each growth one more.
_HANDLES: Final = 128
#: Of Python, an engine's sockets and libraries.
_BESIDE: Final = 64


def examine_version() -> Finding:
    """Name what runs."""
    version = kvarena_version()
    what = f"kvarena {version}, Python {platform.python_version()}"
    return Finding(topic="kvarena", verdict="ok", what=what, data={"version": version})


def examine_start(settings: Settings) -> Iterator[Finding]:
    """Every setting that would end a start on this machine.

    Parameters
    ----------
    settings : Settings
        The operator's.
    """
    for name in ("memory_limit", "pool_bytes"):
        if getattr(settings, name) == 0:
            fix = f"Raise or unset KVARENA_{name.upper()}."
            yield _broken(f"KVARENA_{name.upper()}=0 leaves a pool nothing to back", fix)
    yield from _unknown_engines(settings)
    yield from _transfer_host(settings)
    yield from _metrics_port(settings)
    yield from _descriptors()


def examine_gpu_processes(device: str) -> Iterator[Finding]:
    """Who holds the memory of a GPU, as far as ``nvidia-smi`` tells.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"cuda:<index>"``, an index among all GPUs of the machine.
    """
    command = shutil.which("nvidia-smi")
    if command is None or not device.startswith("cuda"):
        return
    asked = ["--query-compute-apps=pid,used_gpu_memory,process_name", "--format=csv,noheader,nounits"]
    index = device.partition(":")[2] or "0"
    try:
        done = subprocess.run(
            [command, "-i", index, *asked], capture_output=True, text=True, timeout=20, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        pid, mib, name = (*(part.strip() for part in line.split(",", 2)), "", "")[:3]
        if not pid.isdigit():
            continue
        # Inside a container the figure may be "[N/A]".
        held = format_bytes(int(mib) * MIB) if mib.isdigit() else "an unknown part"
        what = f"pid {pid} ({printable(name)}) holds {held} of this GPU's memory"
        data = {"pid": int(pid), "bytes": int(mib) * MIB if mib.isdigit() else None}
        yield Finding(topic="device", verdict="note", what=what, data=data)


def _unknown_engines(settings: Settings) -> Iterator[Finding]:
    from kvarena.plugin.composition import make_engines, make_manager
    from kvarena.pool.arena import Arena
    from kvarena.pool.host_vmm import HostVmm

    others = tuple(name for name in settings.transfer if name not in _OURS)
    if not others:
        return
    driver = HostVmm()
    try:
        with Arena(driver, driver.granularity) as arena:
            pool: Any = SimpleNamespace(arena=arena)
            theirs = msgspec.structs.replace(settings, transfer=others)
            for engine in make_engines(make_manager(settings), theirs, pool):
                engine.close()
    except KvArenaError as error:
        yield _broken(error.what, error.fix)


def _transfer_host(settings: Settings) -> Iterator[Finding]:
    host = settings.transfer_host
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        yield _broken(
            f"KVARENA_TRANSFER_HOST={printable(host)} is not an address of this machine ({why})",
            "Set it to the address that peers reach this machine at.",
        )


def _metrics_port(settings: Settings) -> Iterator[Finding]:
    if settings.metrics_port is None:
        return
    from kvarena.plugin.observe.metrics import MetricsPortError, serve_metrics
    from kvarena.plugin.observe.status.reporter import StatusReporter
    from kvarena.plugin.observe.timeline import Timeline

    try:
        reporter = StatusReporter(Settings(status=False), Timeline())
        serve_metrics(reporter, settings.metrics_port, settings.metrics_host).close()
    except MetricsPortError as error:
        yield _broken(error.what, error.fix)


def _descriptors() -> Iterator[Finding]:
    from kvarena.pool.descriptors import descriptor_limits

    soft, hard, _ = limits = descriptor_limits()
    if limits.left is None:
        return
    # On the host a handle is a descriptor, an export another, and so is each handle of a peer.
    may_need = 3 * _HANDLES + _BESIDE
    if limits.left < may_need:
        yield Finding(
            topic="settings",
            verdict="broken" if limits.left < _BESIDE else "warning",
            what=f"RLIMIT_NOFILE lets a process open {soft} files, {limits.left} of them are left here; a "
            f"pool that grows {_HANDLES} times may need {may_need}",
            fix=f"Raise it: ulimit -n 65536 (without root at most {'any' if hard is None else hard}), or "
            "LimitNOFILE= of the service.",
            data={"soft": soft, "hard": hard, "left": limits.left},
        )


def _broken(what: str, fix: str) -> Finding:
    return Finding(topic="settings", verdict="broken", what=what, fix=fix)
