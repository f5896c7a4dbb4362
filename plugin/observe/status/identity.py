"""Which process this is, so that another one with the same number is not taken for it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal

from kvarena.plugin.observe.status.model import ProcessIdentity

__all__ = ["Condition", "condition_of", "ended_with_its_parent", "identity"]

Condition = Literal["running", "dead", "elsewhere"]


def identity() -> ProcessIdentity:
    """Identify the calling process."""
    pid, parent = os.getpid(), os.getppid()
    return ProcessIdentity(
        pid=pid,
        started=_started(pid) or 0,
        boot_id=_boot_id(),
        pid_namespace=_namespace("pid"),
        time_namespace=_namespace("time"),
        parent_pid=parent,
        parent_started=_started(parent) or 0,
    )


def condition_of(process: ProcessIdentity, *, lock_free: bool | None = None) -> Condition:
    """Whether a process still runs.

    Parameters
    ----------
    process : ProcessIdentity
        As it described itself.
    lock_free : bool, optional
        Whether nobody holds the lock that the process took; None: it took none, or that cannot be told.

    Returns
    -------
    str
        ``"dead"`` only where that is proven. ``"elsewhere"``: its number means nothing here, because it runs
        in another container, on another host, or ran before this host was started again.
    """
    if not process.boot_id or process.boot_id != _boot_id():
        return "elsewhere"
    namespaces = (process.pid_namespace, process.time_namespace)
    if process.pid_namespace and namespaces == (_namespace("pid"), _namespace("time")):
        return "running" if _started(process.pid) == process.started else "dead"
    # On one kernel a lock tells across containers: it goes with the process that held it.
    return "dead" if lock_free else "elsewhere"


def ended_with_its_parent(process: ProcessIdentity) -> bool:
    """Whether the parent of a dead process has gone too: whoever ends a server ends its workers this way."""
    return process.parent_pid > 0 and _started(process.parent_pid) != process.parent_started


def _started(pid: int) -> int | None:
    """Clock ticks since boot (field 22 of /proc/<pid>/stat, proc(5)); None: no such process, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, also parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@cache
def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0
