"""The page channel's connection to a peer, made on a thread of its own: a silent peer holds up nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.peers import PeerLost

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.clock import AwakeClock
    from kvarena.transfer import PageChannel

__all__ = ["PeerConnection"]


class PeerConnection:
    """Connects to one peer, and again whenever its registration has changed or a transfer has failed.

    `renew` asks for it, `poll` tells what came of it; neither waits.

    Parameters
    ----------
    channel : PageChannel
    clock : AwakeClock
    timeout : callable
        Answers how many seconds one attempt may take. An engine that waits for longer keeps its thread,
        but nobody waits for that.
    """

    def __init__(self, channel: PageChannel, clock: AwakeClock, timeout: Callable[[], float]) -> None:
        self.channel = channel
        self.clock = clock
        self._timeout = timeout
        self.peer = ""
        """The peer's key; empty until the first attempt has succeeded."""
        self.hello = b""
        """The peer's last hello."""
        self.error = ""
        """Why the last attempt failed; empty if it did not."""
        self._attempt: _Attempt | None = None
        self._again = False
        self._numbers = 0
        self._ended = 0

    @property
    def ready(self) -> bool:
        """Whether the peer is connected by its last hello."""
        return bool(self.peer) and self._attempt is None

    def renew(self, hello: bytes = b"") -> int:
        """Connect with the peer's new hello, or with its last one.

        Returns
        -------
        int
            The number of the attempt that does it: one that begins now or later. See `ended`.
        """
        self.hello = hello or self.hello
        if self._attempt is None:
            self._begin()
            return self._numbers
        self._again = True
        return self._numbers + 1

    def ended(self, number: int) -> bool:
        """Whether an attempt, or a later one, has ended."""
        return self._ended >= number

    def poll(self) -> KvArenaError | bool:
        """What has come of an attempt since the last call: True, its error, or False for nothing yet."""
        attempt = self._attempt
        if attempt is None:
            return False
        if attempt.ended.is_set():
            outcome: KvArenaError | bool = attempt.error or True
            self.peer = attempt.peer or self.peer
        elif self.clock.now() - attempt.began > self._timeout():
            attempt.abandon()
            outcome = PeerLost(f"the transfer engine got no connection within {self._timeout():g} s.")
        else:
            return False
        self._attempt, self._ended = None, attempt.number
        self.error = "" if outcome is True else str(outcome)
        if self._again:
            self._begin()
        return outcome

    def close(self) -> None:
        """Disconnect; an attempt that is under way is disconnected when it ends."""
        self._again = False
        abandoned = self._attempt is not None and self._attempt.abandon()
        if self._attempt is not None and not abandoned:
            self.peer = self._attempt.peer or self.peer
        self._attempt = None
        if self.peer and not abandoned:
            self.channel.disconnect(self.peer)
        self.peer = ""

    def _begin(self) -> None:
        self._again = False
        self._numbers += 1
        self._attempt = _Attempt(self, self._numbers)


class _Attempt:
    def __init__(self, connection: PeerConnection, number: int) -> None:
        self.number = number
        self.began = connection.clock.now()
        self.ended = threading.Event()
        self.peer = connection.peer
        self.error: KvArenaError | None = None
        self._channel = connection.channel
        self._hello = connection.hello
        self._abandoned = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="kvarena-connect", daemon=True).start()

    def abandon(self) -> bool:
        """Nobody waits for it any more; False if it has ended already."""
        with self._lock:
            self._abandoned = not self.ended.is_set()
            return self._abandoned

    def _run(self) -> None:
        try:
            self.peer = self._channel.connect(self._hello)
        except KvArenaError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - told to the server, which lives on
            self.error = KvArenaError(f"the transfer engine failed: {type(error).__name__}: {error}.")
        with self._lock:
            abandoned = self._abandoned
            self.ended.set()
        if abandoned and self.peer:
            self._channel.disconnect(self.peer)
