"""The way to one Mooncake session: through its mapped arena where that works, and whether it does."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import NamedTuple, final

from kvarena.plugin.engines.sglang.same_host import session_file
from kvarena.transfer import Region, SameHostEngine
from kvarena.transfer.errors import TransferFailed

__all__ = ["AttachedPeer", "PeerSession"]

logger = logging.getLogger("kvarena.sglang")

#: Codes of an engine whose peer has unregistered the destination, has gone, or is forgotten already.
_MOVED = ("EFAULT", "peer", "ENOTCONN")


class AttachedPeer(NamedTuple):
    """A peer whose arena is mapped here."""

    key: str
    """Of the engine's peer."""
    identity: str
    regions: tuple[Region, ...]
    """What may be written there, in the peer's own addresses."""
    version: session_file.FileVersion
    """Of the record that says all this."""


@final
class PeerSession:
    """One peer session.

    It is attached when it is first written to. An attempt or a copy that fails marks it slow, with one
    warning; it is tried again when another engine stands behind the session. That a peer takes its
    registration back is no failure: its record goes first.

    Parameters
    ----------
    engine : SameHostEngine
        Ours.
    directory : Path
        Where records lie.
    session : str
        The peer's ``host:port``.
    """

    def __init__(self, engine: SameHostEngine, directory: Path, session: str) -> None:
        self._engine = engine
        self._directory = directory
        self._session = session
        self._here = session_file.is_this_host(session)
        # Attaching takes a while, and one attempt is enough for all of SGLang's threads.
        self._lock = threading.Lock()
        self._attached: AttachedPeer | None = None
        self._version: session_file.FileVersion | None = None
        self._slow: str | None = None

    def attached_peer(self) -> AttachedPeer | None:
        """The peer if it can be written to through its mapped arena now; None: by Mooncake."""
        if not self._here:
            return None
        with self._lock:
            version = session_file.version_of(self._directory, self._session)
            # A cleaner of old files may take a record away; the connection says whether its engine lives.
            if (
                self._attached is not None
                and self._lives(self._attached)
                and version in (None, self._version)
            ):
                return self._attached
            if version is None or (version == self._version and self._attached is None):
                return None
            return self._attach(version)

    def failed(self, peer: AttachedPeer, error: Exception) -> None:
        """A copy did not end well: leave the peer, and unmap it once what is under way has ended."""
        with self._lock:
            if self._has_moved(peer, error):
                if self._attached == peer:  # else another thread has followed it already
                    self._attached = None
                return
            self._mark_slow(peer.identity, error)
            if self._attached is not None and self._attached.identity != peer.identity:
                return  # a successor of the same name is attached by now
            self._attached = None
            try:
                self._engine.disconnect(peer.key)
            except Exception:
                logger.exception("kvarena: session %s could not be let go.", self._session)

    def _has_moved(self, peer: AttachedPeer, error: Exception) -> bool:
        """Whether the peer let go of what `peer` says, and we heard of it too late."""
        heard = isinstance(error, TransferFailed) and error.code in _MOVED
        return heard and session_file.version_of(self._directory, self._session) != peer.version

    def _attach(self, version: session_file.FileVersion) -> AttachedPeer | None:
        self._version, self._attached = version, None
        record = session_file.read(self._directory, self._session)
        if record is None or record.identity == self._slow:
            return None
        try:
            key = self._engine.connect(record.connection())
        except Exception as error:  # noqa: BLE001 - whatever it is, SGLang's thread must go on by Mooncake
            self._mark_slow(record.identity, error)
            return None
        regions = tuple(Region(*region) for region in record.regions)
        self._attached = AttachedPeer(key, record.identity, regions, version)
        logger.info(
            "kvarena: session %s is on this host: its %d registered bytes are written through mapped memory.",
            self._session,
            sum(region.nbytes for region in regions),
        )
        return self._attached

    def _lives(self, peer: AttachedPeer) -> bool:
        try:
            return self._engine.peer(peer.key).gone is None
        except TransferFailed:
            # Its record may be the same: an engine that died leaves it. Another look is due.
            self._version = None
            return False

    def _mark_slow(self, identity: str, error: Exception) -> None:
        if self._slow == identity:
            return
        self._slow = identity
        logger.warning(
            "kvarena: the same-host path to session %s failed; Mooncake carries everything to it until it "
            "is started anew: %s",
            self._session,
            error,
        )
