"""What two NIXL agents tell each other, and what one remembers of the other."""

from __future__ import annotations

import threading
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from kvarena.transfer._worker import PeerWorker
from kvarena.transfer.protocol import Int64

__all__ = ["Description", "NixlPeer", "Place", "RemoteRegion", "status_of"]


class Place(msgspec.Struct, frozen=True):
    """Where an agent's memory is; NIXL finds no registration of another kind, or on another device."""

    memory: Literal["DRAM", "VRAM"]
    device_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

    def rows(self, addresses: Int64, lengths: Int64) -> npt.NDArray[np.uint64]:
        """Descriptors as NIXL takes them, shape (n, 3)."""
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, self.device_id
        return rows


class RemoteRegion(msgspec.Struct, frozen=True):
    """One registration of a peer, with what NIXL must know of it."""

    address: int
    nbytes: int
    serial: int
    """Another one for each registration: a peer that knows an older one must forget it."""
    metadata: bytes


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What `NixlEngine.describe` answers, encoded."""

    engine: str = "nixl"
    agent: str
    connection: bytes
    place: Place
    regions: tuple[RemoteRegion, ...]


class NixlPeer:
    """A peer that this agent writes to."""

    __slots__ = ("gone", "loaded", "place", "worker")

    def __init__(self, agent: str, place: Place) -> None:
        self.worker = PeerWorker(f"nixl {agent}")
        self.place = place
        self.loaded: set[int] = set()
        """Serials of the regions whose metadata NIXL has."""
        self.gone = threading.Event()


def status_of(error: Exception) -> str:
    """NIXL's status, as ``NOT_FOUND``: its exceptions say ``NIXL_ERR_NOT_FOUND``."""
    text = str(error)
    return text.removeprefix("NIXL_ERR_") if text.startswith("NIXL_ERR_") else type(error).__name__
