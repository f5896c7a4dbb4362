"""What an engine is, to its peers."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvarena.transfer.errors import Difference, ManifestMismatch
from kvarena.transfer.same_host.memory import ArenaMemory

if TYPE_CHECKING:
    from kvarena.transfer.pages.manifest import Manifest

__all__ = ["EngineProfile"]


@dataclass(frozen=True)
class EngineProfile:
    """One life of one engine, and how long it waits for its peers."""

    name: str
    identity: str
    """Which life of the engine this is."""
    arena: ArenaMemory
    manifest: Manifest | None
    connect_timeout: float
    """Seconds that a peer may take to answer."""
    drain_timeout: float
    """Seconds that copies may take to end."""

    def encoded_manifest(self) -> bytes | None:
        """As a peer decodes it."""
        return None if self.manifest is None else self.manifest.encode()

    def check_manifest(self, encoded: bytes | None) -> None:
        """Raise `ManifestMismatch` unless a peer's pages are ours, or neither side says what its are."""
        if self.manifest is None and encoded is None:
            return
        if self.manifest is None or encoded is None:
            said = [value if value is None else "a manifest" for value in (self.manifest, encoded)]
            raise ManifestMismatch([Difference("manifest", *said)])
        self.manifest.check(type(self.manifest).decode(encoded))

    def welcome(self, epoch: int, device: str) -> dict[str, Any]:
        """What a sender is told when it attaches: who we are, and where our arena lies."""
        body: dict[str, Any] = {
            "name": self.name,
            "identity": self.identity,
            "epoch": epoch,
            "device": device,
            "memory": self.arena.driver.name,
            "base": self.arena.base,
            "reserved_bytes": self.arena.reserved_bytes,
        }
        if self.manifest is not None:
            body["manifest"] = b64encode(self.manifest.encode()).decode()
        return body
