"""How much memory this machine, or the container we are in, can still give."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that can be committed without swapping: the kernel's estimate, cut to the cgroup's limit.

    Parameters
    ----------
    meminfo : Path
        The kernel's figures; ``MemAvailable`` is used.
    cgroup : Path
        A cgroup v2 folder; without ``memory.max`` in it there is no limit.
    """
    available = _field(meminfo, "MemAvailable:") * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        # Clean file cache counts as used there, but goes as soon as memory is wanted.
        cache = _field(cgroup / "memory.stat", "inactive_file")
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    return max(0, min(available, int(limit) - used + cache))


def _field(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == key:
            return int(words[1])
    raise ValueError(f"{path} has no {key}")
