"""How many file descriptors this process may open, and how many a pool takes."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

__all__ = ["DescriptorLimits", "descriptor_limits", "descriptors_needed"]


class DescriptorLimits(NamedTuple):
    """RLIMIT_NOFILE of this process, and what it holds; None where there is no limit, or none can be told."""

    soft: int | None
    """What holds now; a process may raise it up to `hard`."""
    hard: int | None
    used: int | None
    """Descriptors that are open; None: not even one is left to count them with."""

    @property
    def left(self) -> int | None:
        """Descriptors that can still be opened; None: no limit."""
        if self.soft is None:
            return None
        return 0 if self.used is None else max(0, self.soft - self.used)


def descriptor_limits() -> DescriptorLimits:
    """What this process may open, read anew at each call."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # less the one that lists them
    except OSError:
        used = None
    return DescriptorLimits(soft, hard, used)


def descriptors_needed(driver: str, handles: int) -> int:
    """The most descriptors that an arena of so many handles holds at once.

    A same-host engine keeps each handle that is registered exported, which
    takes a descriptor. On the host every handle is also a memfd of its own.
    What peers export to this process comes on top: on the host one for each
    handle of theirs.

    Parameters
    ----------
    driver : str
        `Driver.name` of what the arena stands on.
    handles : int
        One after finalize, and one more for each growth.
    """
    return 2 * handles if driver == "host" else handles
