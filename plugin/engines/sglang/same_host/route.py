"""The way to one Mooncake session: through its mapped arena where that works, and whether it does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple, final

from kvarena.plugin.engines.sglang.runtime import logger
from kvarena.plugin.engines.sglang.same_host import card as cards
from kvarena.transfer import Region, SameHostEngine
from kvarena.transfer.errors import TransferFailed

__all__ = ["Reach", "Route"]

#: Codes of an engine whose peer has unregistered the destination, has gone, or is forgotten already.
_MOVED = ("EFAULT", "peer", "ENOTCONN")


class Reach(NamedTuple):
    """A peer whose arena is mapped here."""

    key: str
    """Of the engine's peer."""
    identity: str
    regions: tuple[Region, ...]
    """What may be written there, in the peer's own addresses."""
    stamp: cards.Stamp
    """Of the card that says all this."""


@final
class Route:
    """One peer session.

    It is attached when it is first written to. An attempt or a copy that fails marks it slow, with one
    warning; it is tried again when another engine stands behind the session. That a peer takes its
    registration back is no failure: its card goes first.

    Parameters
    ----------
    engine : SameHostEngine
        Ours.
    directory : Path
        Where cards lie.
    session : str
        The peer's ``host:port``.
    """

    def __init__(self, engine: SameHostEngine, directory: Path, session: str) -> None:
        self._engine = engine
        self._directory = directory
        self._session = session
        self._here = cards.is_this_host(session)
        # Attaching takes a while, and one attempt is enough for all of SGLang's threads.
        self._lock = threading.Lock()
        self._reach: Reach | None = None
        self._stamp: cards.Stamp | None = None
        self._slow: str | None = None

    def reach(self) -> Reach | None:
        """The peer if it can be written to through its mapped arena now; None: by Mooncake."""
        if not self._here:
            return None
        with self._lock:
            stamp = cards.stamp_of(self._directory, self._session)
            # A cleaner of old files may take a card away; the connection says whether its engine lives.
            if self._reach is not None and self._lives(self._reach) and stamp in (None, self._stamp):
                return self._reach
            if stamp is None or (stamp == self._stamp and self._reach is None):
                return None
            return self._attach(stamp)

    def failed(self, reach: Reach, error: Exception) -> None:
        """A copy did not end well: leave the peer, and unmap it once what is under way has ended."""
        with self._lock:
            if self._has_moved(reach, error):
                if self._reach == reach:  # else another thread has followed it already
                    self._reach = None
                return
            self._mark_slow(reach.identity, error)
            if self._reach is not None and self._reach.identity != reach.identity:
                return  # a successor of the same name is attached by now
            self._reach = None
            try:
                self._engine.disconnect(reach.key)
            except Exception:  # noqa: BLE001 - the request goes on by Mooncake
                logger.exception("kvarena: session %s could not be let go.", self._session)

    def _has_moved(self, reach: Reach, error: Exception) -> bool:
        """Whether the peer let go of what `reach` says, and we heard of it too late."""
        heard = isinstance(error, TransferFailed) and error.code in _MOVED
        return heard and cards.stamp_of(self._directory, self._session) != reach.stamp

    def _attach(self, stamp: cards.Stamp) -> Reach | None:
        self._stamp, self._reach = stamp, None
        card = cards.read(self._directory, self._session)
        if card is None or card.identity == self._slow:
            return None
        try:
            key = self._engine.connect(card.connection())
        except Exception as error:  # noqa: BLE001 - whatever it is, SGLang's thread must go on by Mooncake
            self._mark_slow(card.identity, error)
            return None
        regions = tuple(Region(*region) for region in card.regions)
        self._reach = Reach(key, card.identity, regions, stamp)
        logger.info(
            "kvarena: session %s is on this host: its %d registered bytes are written through mapped memory.",
            self._session,
            sum(region.nbytes for region in regions),
        )
        return self._reach

    def _lives(self, reach: Reach) -> bool:
        try:
            return self._engine.peer(reach.key).gone is None
        except TransferFailed:
            # Its card may be the same: an engine that died leaves it. Another look is due.
            self._stamp = None
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
