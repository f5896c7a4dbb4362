"""A transfer under way, on the sender's side."""

from __future__ import annotations

from typing import Protocol, final

from kvarena.transfer.errors import TransferFailed, TransferTimeout
from kvarena.transfer.same_host.copy.clock import Clock

__all__ = ["Receiver", "SameHostPending"]


class Receiver(Protocol):
    """What a transfer asks about the peer that it goes to."""

    @property
    def name(self) -> str:
        """As messages name it."""
        ...

    def look(self, number: int) -> None:
        """See whether it is still there; a transfer that someone waits for does not count if it is not."""
        ...

    def loss(self, number: int) -> str | None:
        """Why a transfer that has ended does not count: the peer was gone before."""
        ...


@final
class SameHostPending:
    """See `kvarena.transfer.Pending`. Nothing is done when it ends: whoever asks looks at the clock.

    Parameters
    ----------
    clock : Clock
        Which shows `number` when it has ended.
    receiver : Receiver
    operations : int
        Pages or ranges, for messages.
    request : str, optional
        Whose pages.
    """

    __slots__ = ("_clock", "_number", "_operations", "_receiver", "_request")

    def __init__(
        self, clock: Clock, number: int, receiver: Receiver, operations: int, request: str | None = None
    ) -> None:
        self._clock = clock
        self._number = number
        self._receiver = receiver
        self._operations = operations
        self._request = request

    def done(self) -> bool:
        """See `Pending.done`."""
        try:
            if not self._clock.has_ended(self._number):
                return False
        except RuntimeError as error:
            raise self._failure("copy", str(error)) from error
        self._require_peer()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """See `Pending.wait`."""
        self._receiver.look(self._number)  # while the copy runs, it costs nothing
        try:
            if not self._clock.wait(self._number, timeout):
                raise TransferTimeout("same-host", self._receiver.name, timeout or 0.0, request=self._request)
        except RuntimeError as error:
            raise self._failure("copy", str(error)) from error
        self._require_peer()

    def _require_peer(self) -> None:
        lost = self._receiver.loss(self._number)
        if lost is not None:
            raise self._failure("peer", lost)

    def _failure(self, code: str, why: str) -> TransferFailed:
        return TransferFailed(
            "same-host", self._receiver.name, code, why, operations=self._operations, request=self._request
        )
