"""The sender's side of a ring: numbers for copies, and a receiver that is asked to make room for them."""

from __future__ import annotations

import time
from typing import final

from kvarena.transfer.errors import TransferFailed
from kvarena.transfer.same_host.channel import Channel, ChannelClosed
from kvarena.transfer.same_host.ring import RECORDS, Ring
from kvarena.transfer.same_host.wire import PacketKind

__all__ = ["Tickets"]


@final
class Tickets:
    """Numbers of a ring, for a sender: there is always room, or the receiver is asked to make some.

    Parameters
    ----------
    name : str
        Of the receiver.
    ring : Ring
    channel : Channel
        To the receiver.
    patience : float
        Seconds that it may take to read.
    """

    def __init__(self, name: str, ring: Ring, channel: Channel, patience: float) -> None:
        self.ring = ring
        self._name = name
        self._channel = channel
        self._patience = patience

    def make_room(self, operations: int) -> None:
        """The next record has a place. Raises `TransferFailed` if the receiver does not read."""
        if self.ring.unread >= RECORDS:
            self._wait_for_room(operations)

    def remind(self) -> None:
        """Half of the ring is unread: ask in time."""
        if self.ring.unread * 2 == RECORDS:
            self._ask()

    def _wait_for_room(self, operations: int) -> None:
        deadline = time.monotonic() + self._patience
        while self.ring.unread >= RECORDS:
            if not self._channel.is_open or time.monotonic() > deadline:
                why = f"it leaves {RECORDS} finished copies unread"
                raise TransferFailed("same-host", self._name, "peer", why, operations=operations)
            self._ask()
            time.sleep(1e-3)

    def _ask(self) -> None:
        try:
            self._channel.send(PacketKind.COLLECT, {})
        except ChannelClosed:
            return  # its end is on its way
