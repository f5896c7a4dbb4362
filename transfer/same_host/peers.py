"""The receivers that an engine is attached to, and what it tells senders of itself."""

from __future__ import annotations

import socket
import threading
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from kvarena.transfer.errors import Difference, ManifestMismatch, QuiesceTimeout, TransferFailed
from kvarena.transfer.same_host.attach import Description, attach
from kvarena.transfer.same_host.channel import SocketLoop
from kvarena.transfer.same_host.copy.clock import Copier
from kvarena.transfer.same_host.direction import Asked, Direction
from kvarena.transfer.same_host.errors import HandleImportError, PeerRefused
from kvarena.transfer.same_host.exports import Exports
from kvarena.transfer.same_host.incoming import IncomingTable
from kvarena.transfer.same_host.mapped_arena import MappedArena
from kvarena.transfer.same_host.memory import ArenaMemory
from kvarena.transfer.same_host.peer import Peer
from kvarena.transfer.same_host.pull import Puller
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.subscribers import Followers

if TYPE_CHECKING:
    from kvarena.transfer.pages.manifest import Manifest

__all__ = ["PeerSettings", "Peers", "Welcomes"]


@dataclass(frozen=True)
class PeerSettings:
    """What an engine is, to its peers."""

    name: str
    identity: str
    """Which life of it this is."""
    arena: ArenaMemory
    manifest: Manifest | None
    direction: Asked
    connect_timeout: float
    drain_timeout: float

    def encoded_manifest(self) -> bytes | None:
        """For a peer."""
        return None if self.manifest is None else self.manifest.encode()

    def check_manifest(self, encoded: bytes | None) -> None:
        """Raise `ManifestMismatch` unless a peer's pages are ours, or neither side says what its are."""
        if self.manifest is None and encoded is None:
            return
        if self.manifest is None or encoded is None:
            said = [value if value is None else "a manifest" for value in (self.manifest, encoded)]
            raise ManifestMismatch([Difference("manifest", *said)])
        self.manifest.check(type(self.manifest).decode(encoded))

    def about_arena(self) -> dict[str, Any]:
        """Where it lies, for a peer that maps it."""
        return {
            "memory": self.arena.driver.name,
            "base": self.arena.base,
            "reserved_bytes": self.arena.reserved_bytes,
        }


@final
class Peers:
    """By name."""

    def __init__(
        self,
        settings: PeerSettings,
        copier: Copier,
        exports: Exports,
        followers: Followers,
        loop: SocketLoop,
    ) -> None:
        self.settings = settings
        self._copier = copier
        self._exports = exports
        self._followers = followers
        self._loop = loop
        self._connecting = threading.Lock()
        self._known: dict[str, Peer] = {}
        self._closed = False

    def __getitem__(self, key: str) -> Peer:
        """Raises `TransferFailed`."""
        peer = self._known.get(key)
        if peer is None:
            raise TransferFailed(
                "same-host", key, "ENOTCONN", "not connected", fix="Connect to its description."
            )
        return peer

    @property
    def all(self) -> tuple[Peer, ...]:
        """As of now."""
        return tuple(self._known.values())

    def connect(self, description: bytes) -> str:
        """See `SameHostEngine.connect`."""
        wanted = Description.decode(description)
        timeout = self.settings.connect_timeout
        with self._connecting:
            if self._closed:
                raise TransferFailed("same-host", wanted.name, "EBADF", "this engine is closed")
            known = self._known.get(wanted.name)
            if known is not None and known.identity == wanted.identity and known.gone is None:
                if known.wait_for_epoch(wanted.epoch, timeout):
                    return known.name
                why = known.gone or f"it did not export epoch {wanted.epoch} within {timeout:g} s"
                raise PeerRefused(wanted.name, "unreachable", why)
            if known is not None and known.is_live:
                # In another directory; or the description is of an earlier life of it.
                raise PeerRefused(
                    wanted.name,
                    "name",
                    "a live peer of that name is connected, and it is another one",
                    fix="Give every engine of a host its own name, and connect to its newest description.",
                )
            if known is not None:
                known.close("it was started anew")
            peer = attach(
                wanted,
                name=self.settings.name,
                identity=self.settings.identity,
                manifest=self.settings.encoded_manifest(),
                check_manifest=self.settings.check_manifest,
                driver=self.settings.arena.driver,
                copier=self._copier,
                direction=self.settings.direction,
                make_peer=lambda *parts: self._make(wanted, *parts),
                timeout=timeout,
            )
            if peer.direction == "pull" and not peer.offer(self.settings.about_arena(), timeout):
                why = peer.gone or f"it did not map our arena within {timeout:g} s"
                peer.close(why)
                raise HandleImportError(wanted.name, 0, self.settings.arena.reserved_bytes, why)
            self._known[peer.name] = peer
            if peer.gone is not None:  # it went while it was being entered
                self._forget(peer)
                raise PeerRefused(wanted.name, "unreachable", peer.gone)
            return peer.name

    def drain(self, timeout: float) -> None:
        """Wait for all copies to all of them. Raises `QuiesceTimeout`."""
        for peer in self.all:
            if not peer.drain(timeout):
                raise QuiesceTimeout(
                    f"Transfers to {peer.name} did not end", in_flight=peer.in_flight, seconds=timeout
                )

    def look_at_copier(self) -> None:
        """Nobody may be waiting when the device dies: let the receivers know."""
        why = self._copier.fault()
        if why is not None:
            for peer in self.all:
                peer.close(why)

    def disconnect(self, key: str) -> None:
        """Forget one; waits for what is under way."""
        peer = self._known.pop(key, None)
        if peer is not None:
            peer.close("it was disconnected here")

    def close(self) -> None:
        """Forget all."""
        with self._connecting:
            self._closed = True
            peers = self.all
            self._known.clear()
        for peer in peers:
            peer.close("this engine was closed")

    def leave_to_parent(self) -> None:
        """In a forked child: forget all, without a word."""
        self._closed = True
        self._known = {}
        self._connecting = threading.Lock()

    def _make(
        self, wanted: Description, direction: Direction, arena: MappedArena, ring: Ring, sock: socket.socket
    ) -> Peer:
        return Peer(
            wanted.name,
            wanted.identity,
            direction,
            arena,
            ring,
            self._copier,
            self._exports,
            self._followers,
            self._loop,
            sock,
            self._forget,
            self.settings.drain_timeout,
        )

    def _forget(self, peer: Peer) -> None:
        """A peer is gone; its successor of the same name may be there already."""
        if self._known.get(peer.name) is peer:
            self._known.pop(peer.name, None)


@final
class Welcomes:
    """See `Host`."""

    def __init__(
        self, settings: PeerSettings, copier: Copier, exports: Exports, incoming: IncomingTable
    ) -> None:
        self._settings = settings
        self._copier = copier
        self._exports = exports
        self._incoming = incoming

    def welcome(self, device: str) -> dict[str, Any]:
        """See `Host.welcome`."""
        body: dict[str, Any] = {
            "name": self._settings.name,
            "identity": self._settings.identity,
            "epoch": self._exports.epoch,
            "device": self._copier.identity(),
            "reaches": self._copier.can_reach(device),
            **self._settings.about_arena(),
        }
        manifest = self._settings.encoded_manifest()
        if manifest is not None:
            body["manifest"] = b64encode(manifest).decode()
        return body

    def check_manifest(self, encoded: bytes | None) -> None:
        """See `Host.check_manifest`."""
        self._settings.check_manifest(encoded)

    def make_puller(self, name: str, base: int, reserved_bytes: int, memory: str, ring: Ring) -> Puller:
        """See `Host.make_puller`."""
        driver = self._settings.arena.driver
        if memory != driver.name:
            raise HandleImportError(name, 0, reserved_bytes, f"it is {memory} memory, ours is {driver.name}.")
        return Puller(
            name,
            MappedArena(driver, name, base, reserved_bytes),
            self._copier,
            self._exports,
            self._incoming,
            ring,
            self._settings.drain_timeout,
        )
