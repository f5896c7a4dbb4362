"""What went through an engine so far."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Final, NamedTuple, final

__all__ = ["OTHER_PEERS", "Histogram", "Traffic"]

#: From a page between two processes of a host to a long prompt over a slow network.
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BYTES: Final = tuple(float(1 << power) for power in range(14, 36, 2))  # 16 KiB to 16 GiB
#: A peer that starts again has another name: without a bound they would only ever grow.
_MAX_PEERS: Final = 64
OTHER_PEERS: Final = "other"
"""Under this name the peers beyond the first 64 are counted together."""


class Histogram(NamedTuple):
    """Observations, counted as Prometheus does."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Of observations up to each bound and above the one before; the last entry is of those above all."""
    total: float
    """The sum of all observations."""


@final
class Traffic:
    """Counts the transfers of one engine; only ever grows. Any thread may count and read.

    Attributes
    ----------
    transfers : int
        Submitted.
    nbytes : int
        Bytes of those that ended well.
    received_nbytes : int
        Bytes of the pages that peers have written here under a lease.
    failures : int
        Refused at submission, or ended badly.
    """

    __slots__ = (
        "_bytes",
        "_lock",
        "_peers",
        "_seconds",
        "failures",
        "nbytes",
        "received_nbytes",
        "transfers",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.transfers = 0
        self.nbytes = 0
        self.received_nbytes = 0
        self.failures = 0
        self._peers: dict[str, int] = {}
        self._seconds = _Counts(_SECONDS)
        self._bytes = _Counts(_BYTES)

    def submitted(self, peer: str = "") -> None:
        """One more was handed to the engine, for this peer."""
        with self._lock:
            self.transfers += 1
            name = peer if peer in self._peers or len(self._peers) < _MAX_PEERS else OTHER_PEERS
            self._peers[name] = self._peers.get(name, 0) + 1

    def ended(self, nbytes: int, seconds: float | None = None) -> None:
        """One has ended well, and took so long as far as it is known."""
        with self._lock:
            self.nbytes += nbytes
            self._bytes.observe(nbytes)
            if seconds is not None:
                self._seconds.observe(seconds)

    def received(self, nbytes: int) -> None:
        """Pages of so many bytes have been written here."""
        with self._lock:
            self.received_nbytes += nbytes

    def failed(self) -> None:
        """One was refused, or has ended badly."""
        with self._lock:
            self.failures += 1

    @property
    def peers(self) -> dict[str, int]:
        """Transfers submitted for each peer; at most 64 of them, the others as `OTHER_PEERS`."""
        with self._lock:
            return dict(self._peers)

    @property
    def seconds(self) -> Histogram:
        """How long the transfers took that ended well, from submission until their end was noticed."""
        with self._lock:
            return self._seconds.read()

    @property
    def sizes(self) -> Histogram:
        """Bytes of the transfers that ended well."""
        with self._lock:
            return self._bytes.read()


class _Counts:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)
