"""What went through an engine so far."""

from __future__ import annotations

import threading
from typing import final

__all__ = ["Traffic"]


@final
class Traffic:
    """Counts the transfers of one engine; only ever grows. Any thread may count and read.

    Attributes
    ----------
    transfers : int
        Submitted.
    nbytes : int
        Bytes of those that ended well.
    failures : int
        Refused at submission, or ended badly.
    """

    __slots__ = ("_lock", "failures", "nbytes", "transfers")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.transfers = 0
        self.nbytes = 0
        self.failures = 0

    def submitted(self) -> None:
        """One more was handed to the engine."""
        with self._lock:
            self.transfers += 1

    def ended(self, nbytes: int) -> None:
        """One has ended well."""
        with self._lock:
            self.nbytes += nbytes

    def failed(self) -> None:
        """One was refused, or has ended badly."""
        with self._lock:
            self.failures += 1
