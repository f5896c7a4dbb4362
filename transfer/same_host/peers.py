"""The receivers that an engine is attached to."""

from __future__ import annotations

import contextlib
import threading
from typing import final

from kvarena.transfer.errors import QuiesceTimeout, TransferFailed
from kvarena.transfer.same_host.attach import Description, attach
from kvarena.transfer.same_host.channel import SocketLoop
from kvarena.transfer.same_host.copy.clock import Copier
from kvarena.transfer.same_host.errors import PeerRefused
from kvarena.transfer.same_host.exports import Exports
from kvarena.transfer.same_host.peer import Peer, SendingSide
from kvarena.transfer.same_host.profile import EngineProfile

__all__ = ["Peers"]


@final
class Peers:
    """The peers that this engine sends to, by the names that callers gave them."""

    def __init__(self, profile: EngineProfile, copier: Copier, exports: Exports, loop: SocketLoop) -> None:
        self.profile = profile
        self._copier = copier
        self._ours = SendingSide(copier, exports, loop, profile.drain_timeout, self._forget)
        self._connecting = threading.Lock()
        self._known: dict[str, Peer] = {}
        # Those that are gone and under whose memory copies were still running.
        self._undrained: list[Peer] = []
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
        timeout = self.profile.connect_timeout
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
            peer = attach(wanted, self.profile, self._copier, lambda attached: Peer(attached, self._ours))
            self._known[peer.name] = peer
            if peer.gone is not None:  # it went while it was being entered
                self._forget(peer)
                raise PeerRefused(wanted.name, "unreachable", peer.gone)
            return peer.name

    def drain(self, timeout: float) -> None:
        """Wait for all copies to all of them. Raises `QuiesceTimeout`."""
        for peer in (*self.all, *self._undrained):
            if not peer.drain(timeout):
                raise QuiesceTimeout(
                    f"Transfers to {peer.name} did not end", in_flight=peer.in_flight, seconds=timeout
                )

        self.let_go()

    def let_go(self) -> None:
        """Unmap the memory of those that are gone and were still written to, where that has ended."""
        for peer in tuple(self._undrained):
            if peer.let_go():
                with contextlib.suppress(ValueError):  # another thread has seen it, too
                    self._undrained.remove(peer)

    def look_at_copier(self) -> None:
        """Nobody may be waiting when the device dies: let the receivers know."""
        self.let_go()
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
        """Disconnect every peer; none can connect afterwards."""
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

    def _forget(self, peer: Peer) -> None:
        """A peer is gone; its successor of the same name may be there already."""
        if peer.in_flight:
            self._undrained.append(peer)
        if self._known.get(peer.name) is peer:
            self._known.pop(peer.name, None)
