"""The senders that map our arena: what they were told of it, and what they answered."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import final

from kvarena.transfer.same_host.channel import Channel, ChannelClosed
from kvarena.transfer.same_host.exports import Exports
from kvarena.transfer.same_host.sent_leases import LeaseKey
from kvarena.transfer.same_host.wire import PacketKind

__all__ = ["Subscriber", "Subscribers"]

_log = logging.getLogger(__name__)


@final
class Subscriber:
    """One of them.

    Parameters
    ----------
    name : str
        Of the engine.
    channel : Channel
        To it.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.channel = channel
        self.known_handles: frozenset[int] = frozenset()
        self.mapped_epoch = -1
        self.revoking: set[LeaseKey] = set()


@final
class Subscribers:
    """All of them.

    Parameters
    ----------
    exports : Exports
        Guarded by `changed`'s lock.
    changed : threading.Condition
        Notified when one has answered or gone.
    """

    def __init__(self, exports: Exports, changed: threading.Condition) -> None:
        self._exports = exports
        self._changed = changed
        self._all: set[Subscriber] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Who they are."""
        with self._changed:
            return tuple(subscriber.name for subscriber in self._all)

    def add(self, subscriber: Subscriber) -> None:
        """Tell one more what there is."""
        with self._changed:
            self._all.add(subscriber)
            self._tell(subscriber)

    def remove(self, subscriber: Subscriber) -> None:
        """It is gone."""
        with self._changed:
            self._all.discard(subscriber)
            self._changed.notify_all()

    def answered(self, subscriber: Subscriber, epoch: int) -> None:
        """It has mapped that epoch, and uses nothing older."""
        with self._changed:
            subscriber.mapped_epoch = epoch
            self._changed.notify_all()

    def revoked(self, subscriber: Subscriber, key: LeaseKey) -> None:
        """It writes nothing more under that lease."""
        with self._changed:
            subscriber.revoking.discard(key)
            self._changed.notify_all()

    def tell_all(self) -> None:
        """Send every one what has changed; the caller holds the lock."""
        for subscriber in list(self._all):
            self._tell(subscriber)

    def wait_until_let_go(self, epoch: int, timeout: float) -> None:
        """Wait until none maps or uses anything older; whoever does not answer is let go.

        Its memory is then its own copy of what was ours: a handle lives as long as anyone maps it.
        """
        self._wait(
            lambda subscriber: subscriber.mapped_epoch >= epoch,
            timeout,
            "did not let go of memory that is given back",
        )

    def revoke(self, key: LeaseKey, sender: str | None, timeout: float) -> None:
        """Tell senders that a lease has ended, and wait until nobody writes under it.

        Parameters
        ----------
        sender : str, optional
            The only one that may write it, if that is known: then nobody else is asked or waited for.
        """
        with self._changed:
            for subscriber in self._all:
                if sender not in (None, subscriber.name):
                    continue
                subscriber.revoking.add(key)
                with contextlib.suppress(ChannelClosed):
                    subscriber.channel.send(PacketKind.REVOKE, {"request": key[0], "serial": key[1]})
        self._wait(
            lambda subscriber: key not in subscriber.revoking,
            timeout,
            "did not answer that a lease was revoked",
        )

    def _tell(self, subscriber: Subscriber) -> None:
        try:
            for page in self._exports.update_for(subscriber.known_handles):
                subscriber.channel.send(PacketKind.EXPORT, page.body, page.fds)
        except ChannelClosed:
            return  # its end is on its way
        subscriber.known_handles = self._exports.handles

    def _wait(self, answered: Callable[[Subscriber], bool], timeout: float, otherwise: str) -> None:
        def silent() -> list[Subscriber]:
            return [subscriber for subscriber in self._all if not answered(subscriber)]

        with self._changed:
            if self._changed.wait_for(lambda: not silent(), timeout):
                return
            late = silent()
        for subscriber in late:
            _log.warning("same-host: %s %s within %g s: it is detached", subscriber.name, otherwise, timeout)
            subscriber.channel.close(f"it {otherwise}")
