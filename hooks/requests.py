"""What the hooks are asked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarena.pool import Arena, Driver, ResizablePool

__all__ = ["BudgetRequest", "TransferConfig"]


@dataclass(frozen=True)
class BudgetRequest:
    """The pool to size, and what must stay free beside it."""

    pool: ResizablePool
    driver: Driver
    headroom_bytes: int = 0
    """Bytes to leave free, for activations that no captured graph covers."""
    max_bytes: int | None = None
    """A limit that the operator set; None: what fits. The memory behind the pool may not exceed it either."""


@dataclass(frozen=True)
class TransferConfig:
    """The transfer engines that a process was configured with."""

    engines: Sequence[str] = ()
    """Names: ``"mooncake"``, ``"nixl"``, ``"same-host"``, or a third party's."""
    hostname: str = "127.0.0.1"
    """The address that peers reach this process at."""
    timeout_s: float = 10.0
    """Seconds after which a transfer counts as failed."""
    arena: Arena | None = None
    """The memory to transfer, for engines that must know more of it than addresses."""
    socket_dir: str | None = None
    """Where an engine may make sockets: a directory of mode 0700; None: chosen by the engine."""
