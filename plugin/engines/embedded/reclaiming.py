"""Leases taken back on a thread of its own: an engine may wait for a sender that has stopped."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Final

from kvarena.errors import KvArenaError

if TYPE_CHECKING:
    from kvarena.transfer import Lease, PageChannel

__all__ = ["Reclaimer", "Reclamation"]

_RETRY_S: Final = 0.5


class Reclamation:
    """One lease that is being taken back."""

    def __init__(self, lease: Lease, why: str) -> None:
        self.lease = lease
        self.why = why
        self.proven = False
        """Whether nobody writes under the lease, now or later."""
        self.failure = ""
        """Why the last attempt could not prove that; it is tried again."""


class Reclaimer:
    """Asks the transfer engine to take leases back, one after the other, until it says that nobody writes.

    Parameters
    ----------
    channel : PageChannel
    """

    def __init__(self, channel: PageChannel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Reclamation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = True

    def take_back(self, lease: Lease, why: str) -> Reclamation:
        """Begin; never waits. An engine that checks no leases has nothing to wait for."""
        reclamation = Reclamation(lease, why)
        if self._channel.leased is None:
            reclamation.proven = True
            return reclamation
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvarena-reclaim", daemon=True)
            self._thread.start()
        self._queue.put(reclamation)
        return reclamation

    def close(self, timeout: float) -> None:
        """Stop, after what is queued has been tried once more, or `timeout` seconds have passed."""
        self._open = False
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (reclamation := self._queue.get()) is not None:
            try:
                self._channel.take_back(reclamation.lease, reclamation.why)
            except KvArenaError as error:
                reclamation.failure = str(error)
            except Exception as error:  # noqa: BLE001 - the pages stay quarantined, the thread goes on
                reclamation.failure = f"{type(error).__name__}: {error}"
            else:
                reclamation.proven = True
            if not reclamation.proven and self._open:
                time.sleep(_RETRY_S)
                self._queue.put(reclamation)
