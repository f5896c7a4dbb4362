"""Engines that know our arena: what they were told of it, and what they answered."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import final

from kvarena.transfer.same_host.channel import Channel, ChannelClosed
from kvarena.transfer.same_host.exports import Exports, Told
from kvarena.transfer.same_host.sent_leases import LeaseKey
from kvarena.transfer.same_host.wire import Kind

__all__ = ["Follower", "Followers"]

_log = logging.getLogger(__name__)


@final
class Follower:
    """One of them.

    Parameters
    ----------
    name : str
        Of the engine.
    channel : Channel
        To it.
    sends : bool
        Whether it sends to us, so that leases are revoked with it.
    """

    def __init__(self, name: str, channel: Channel, *, sends: bool = False) -> None:
        self.name = name
        self.channel = channel
        self.sends = sends
        self.told = Told()
        self.mapped_epoch = -1
        self.revoking: set[LeaseKey] = set()


@final
class Followers:
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
        self._all: set[Follower] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Who they are."""
        with self._changed:
            return tuple(follower.name for follower in self._all)

    def add(
        self, follower: Follower, is_gone: Callable[[], bool] = lambda: False, timeout: float = 0.0
    ) -> bool:
        """Tell one more what there is; whether it has mapped it within `timeout` seconds."""
        with self._changed:
            self._all.add(follower)
            epoch = self._exports.epoch
            self._tell(follower, fence=False)
            return (
                self._changed.wait_for(lambda: follower.mapped_epoch >= epoch or is_gone(), timeout)
                and not is_gone()
            )

    def remove(self, follower: Follower) -> None:
        """It is gone."""
        with self._changed:
            self._all.discard(follower)
            self._changed.notify_all()

    def answered(self, follower: Follower, epoch: int) -> None:
        """It has mapped that epoch, and uses nothing older."""
        with self._changed:
            follower.mapped_epoch = epoch
            self._changed.notify_all()

    def revoked(self, follower: Follower, key: LeaseKey) -> None:
        """It writes nothing more under that lease."""
        with self._changed:
            follower.revoking.discard(key)
            self._changed.notify_all()

    def tell_all(self, *, fence: bool) -> None:
        """Send every one what has changed; the caller holds the lock.

        `fence`: they must end what they are copying before they follow, as a region has gone.
        """
        for follower in list(self._all):
            self._tell(follower, fence=fence)

    def wait_until_let_go(self, epoch: int, timeout: float) -> None:
        """Wait until none maps or uses anything older; whoever does not answer is let go.

        Its memory is then its own copy of what was ours: a handle lives as long as anyone maps it.
        """
        self._wait(
            lambda follower: follower.mapped_epoch >= epoch,
            timeout,
            "did not let go of memory that is given back",
        )

    def revoke(self, key: LeaseKey, timeout: float) -> None:
        """Tell every sender that a lease has ended, and wait until nobody writes under it."""
        with self._changed:
            for follower in self._all:
                if follower.sends:
                    follower.revoking.add(key)
                    with contextlib.suppress(ChannelClosed):
                        follower.channel.send(Kind.REVOKE, {"request": key[0], "serial": key[1]})
        self._wait(
            lambda follower: key not in follower.revoking, timeout, "did not answer that a lease was revoked"
        )

    def _tell(self, follower: Follower, *, fence: bool) -> None:
        try:
            for page in self._exports.update_for(follower.told, fence=fence):
                follower.channel.send(Kind.EXPORT, page.body, page.fds)
        except ChannelClosed:
            return  # its end is on its way
        self._exports.told_all(follower.told)

    def _wait(self, answered: Callable[[Follower], bool], timeout: float, otherwise: str) -> None:
        def silent() -> list[Follower]:
            return [follower for follower in self._all if not answered(follower)]

        with self._changed:
            if self._changed.wait_for(lambda: not silent(), timeout):
                return
            late = silent()
        for follower in late:
            _log.warning("same-host: %s %s within %g s: it is detached", follower.name, otherwise, timeout)
            follower.channel.close(f"it {otherwise}")
