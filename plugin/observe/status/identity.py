"""Which process this is, so that another one with the same number is not taken for it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal

from kvarena.plugin.observe.status.model import ProcessIdentity

__all__ = ["Condition", "condition_of", "identity"]

Condition = Literal["running", "dead", "elsewhere"]


def identity() -> ProcessIdentity:
    """Of the calling process."""
    pid = os.getpid()
    return ProcessIdentity(
        pid=pid, started=_started(pid) or 0, boot_id=_boot_id(), pid_namespace=_pid_namespace()
    )


def condition_of(process: ProcessIdentity) -> Condition:
    """Whether a process still runs; ``"elsewhere"`` when its number means nothing here."""
    if process.boot_id != _boot_id():
        return "dead"
    if process.pid_namespace != _pid_namespace():
        return "elsewhere"
    return "running" if _started(process.pid) == process.started else "dead"


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
def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
