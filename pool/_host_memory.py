"""How much memory this machine, or the control group that this process is in, can still give."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvarena.errors import DescriptorLimitError

__all__ = ["available_bytes"]


class _Files(NamedTuple):
    """What a control group's files are called; the two versions of the interface differ in nothing else."""

    limit: str
    usage: str
    cache: str
    """The key in ``memory.stat`` of clean file cache, which counts as used but goes when memory is wanted."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be committed without swapping.

    The kernel's estimate (``MemAvailable``), or what the tightest control
    group leaves: that of this process or any above it, in cgroup v1 and v2.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are mounted.

    Raises
    ------
    DescriptorLimitError
        No file descriptor is left to read the figures with.
    OSError, ValueError
        ``/proc/meminfo`` cannot be read, or states no ``MemAvailable``.
    """
    meminfo = root / "proc/meminfo"
    try:
        kib = {words[0]: int(words[1]) for words in map(str.split, meminfo.read_text().splitlines())}
    except OSError as error:
        DescriptorLimitError.raise_for(error, f"reading {meminfo}")
        raise
    if "MemAvailable:" not in kib:
        raise ValueError(f"{meminfo} has no MemAvailable")
    available = kib["MemAvailable:"] * 1024
    # A limit above the whole machine holds nothing back; what is used of it need not be read.
    total = kib.get("MemTotal:", sys.maxsize) * 1024
    left = [_left(group, files, total) for group, files in _groups(root)]
    return max(0, min([available, *(each for each in left if each is not None)]))


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's control groups, each with all above it up to the mount."""
    mounts = _mounts(root)
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            files = _V2
        elif "memory" in controllers.split(","):
            files = _V1
        else:
            continue
        for mounted_root, mount in mounts[files]:
            yield from ((folder, files) for folder in _upwards(root, mounted_root, mount, path))


@functools.cache
def _mounts(root: Path) -> dict[_Files, list[tuple[str, str]]]:
    """Where each version is mounted: (the group that is mounted, the mount point); see proc(5), mountinfo.

    Read once, for they stay where they are, and growth waits for it.
    """
    found: dict[_Files, list[tuple[str, str]]] = {_V1: [], _V2: []}
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        where, what = left.split(), right.split()
        if len(where) < 5 or len(what) < 3:
            continue
        if what[0] == "cgroup2":
            found[_V2].append((where[3], where[4]))
        elif what[0] == "cgroup" and "memory" in what[2].split(","):
            found[_V1].append((where[3], where[4]))
    return found


def _upwards(root: Path, mounted_root: str, mount: str, path: str) -> Iterator[Path]:
    """The folder of the group `path` and those above it, as far as the mount shows them."""
    top = root / mount.lstrip("/")
    # A container may see only its own group mounted (then its path begins with that), or its own as "/".
    inside = path[len(mounted_root) :] if _begins(path, mounted_root) else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:  # it was moved out of its namespace: only the mount's own limits are known
        parts = []
    for count in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:count])


def _begins(path: str, mounted_root: str) -> bool:
    return mounted_root == "/" or path == mounted_root or path.startswith(mounted_root + "/")


def _left(group: Path, files: _Files, total: int) -> int | None:
    """Bytes below one group's limit; None: it has none below `total`, or no memory controller (v2's root)."""
    try:
        limit = (group / files.limit).read_text().strip()
        if limit == "max" or int(limit) >= total:
            return None
        used = int((group / files.usage).read_text())
        stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
        return int(limit) - used + int(stat.get(files.cache, 0))
    except ValueError:
        return None
    except OSError as error:
        DescriptorLimitError.raise_for(error, f"reading {group}")
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError as error:
        DescriptorLimitError.raise_for(error, f"reading {path}")
        return []
