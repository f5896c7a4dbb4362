"""A forked child inherits an engine's descriptors, but none of its threads: there the engine is closed.

Otherwise a peer would take the connections of a dead parent for alive as long as a child of it lives, and a
child that closes the engine would end the parent's connections and take its socket away.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Inherited", "close_in_children"]


class Inherited(Protocol):
    """What a child must let go."""

    def leave_to_parent(self) -> None:
        """Close it in this process, without a word to its peers and without any lock."""
        ...


_live: weakref.WeakSet[Inherited] = weakref.WeakSet()


def close_in_children(engine: Inherited) -> None:
    """From now on, for as long as it lives."""
    _live.add(engine)


def _leave_all() -> None:
    for engine in tuple(_live):
        engine.leave_to_parent()
    _live.clear()


os.register_at_fork(after_in_child=_leave_all)
