"""What two NIXL agents tell each other, and what one remembers of the other."""

from __future__ import annotations

import threading

import msgspec
from kvarena.transfer._worker import PeerWorker

__all__ = ["Description", "NixlPeer", "RemoteRegion", "status_of"]


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
    regions: tuple[RemoteRegion, ...]


class NixlPeer:
    """A peer that this agent writes to."""

    __slots__ = ("gone", "loaded", "worker")

    def __init__(self, agent: str) -> None:
        self.worker = PeerWorker(f"nixl {agent}")
        self.loaded: set[int] = set()
        """Serials of the regions whose metadata NIXL has."""
        self.gone = threading.Event()


def status_of(error: Exception) -> str:
    """NIXL's status, as ``NOT_FOUND``: its exceptions say ``NIXL_ERR_NOT_FOUND``."""
    text = str(error)
    return text.removeprefix("NIXL_ERR_") if text.startswith("NIXL_ERR_") else type(error).__name__
