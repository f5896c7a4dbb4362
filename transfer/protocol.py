"""What kvarena asks of a transfer engine, and what it must know about one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Addresses", "BufferInfos", "Capabilities", "Int64", "Pending", "Region", "TransferEngine"]

Int64: TypeAlias = npt.NDArray[np.int64]
"""Addresses, lengths or page ids as an array."""

Addresses: TypeAlias = Sequence[int] | Int64
"""Addresses or lengths in bytes, one for each operation of a batch."""


class Region(NamedTuple):
    """Bytes that an engine has registered, or should."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + self.nbytes


class BufferInfos(NamedTuple):
    """What a pool's ``get_contiguous_buf_infos`` answers: three lists of one length."""

    ptrs: list[int]
    lens: list[int]
    """Backed bytes behind each pointer."""
    item_lens: list[int]
    """Bytes of one page envelope."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can and cannot do; the ledger and the page planner obey it."""

    crosses_seams: bool
    """One transfer may span two adjacent registered regions."""
    spans_handles: bool
    """One region may span several physical handles."""
    max_region_bytes: int | None = None
    """The largest region that one registration takes; None: no limit."""
    detects_unmapped: bool = False
    """Registering bytes without memory fails (Mooncake over TCP does not notice)."""
    live_reregistration: bool = False
    """A region may be added while peers are connected, and they may use it (after a refresh)."""
    max_batch: int | None = None
    """The most operations that one submission takes; None: no limit."""


class Pending(Protocol):
    """A submitted batch of writes."""

    def done(self) -> bool:
        """Whether it has ended well; raises `TransferFailed` if it has ended badly. Never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has ended; raises `TransferFailed`, or `TransferTimeout` after `timeout` seconds."""
        ...


class TransferEngine(Protocol):
    """Registers memory and writes it into a peer's.

    `register` and `unregister` are all or nothing: one that raises leaves the engine as it was.
    """

    @property
    def name(self) -> str:
        """As errors, reports and ``--transfer`` name it."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; the same for all of its life."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Let the engine use these bytes. Raises `RegistrationError` with engine, region and code."""
        ...

    def unregister(self, regions: Sequence[Region]) -> None:
        """Take back exactly these regions. Raises `RegistrationError`."""
        ...

    def describe(self) -> bytes:
        """What a peer needs to reach this engine as it is registered now (opaque)."""
        ...

    def connect(self, description: bytes) -> str:
        """A peer from its description, or the refreshed one; returns the peer's key."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer and all that was mapped or cached of it; an unknown one is no error."""
        ...

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Pending:
        """Start writing local addresses to a peer's addresses. Raises `TransferFailed` if it cannot.

        The columns are the caller's again when it returns.
        """
        ...

    def close(self) -> None:
        """Let go of every region and peer; a second call does nothing."""
        ...
