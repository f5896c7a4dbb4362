"""Growth and give-back of both pools while the demo serves, driven by its client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.worker import Role

__all__ = ["GrowthDriver", "GrowthReport"]

_ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
# Until every lease on a tail has ended, its prompts must be computed: long, on a busy machine.
_LIMIT_S: Final = 60.0


class GrowthReport(msgspec.Struct, frozen=True):
    """What the pools went through while requests were served."""

    cycles: int
    """That each side grew and gave back again."""
    nbytes: int
    """By which a pool grew."""
    in_flight: int
    """Leases and transfers that were out at the moments of all changes together."""
    waited_ms: float
    """The longest that a change had to wait for leases and transfers to end."""
    served_again: int
    """Requests that were served again, to keep pages moving."""
    failed_transfers: int
    """Transfers that an engine refused or broke off: none, or growth has cost something."""


class GrowthDriver:
    """Lets each side of the pair grow and give back, a change after each prompt that has moved.

    Parameters
    ----------
    cycles : int
        Growths, each given back again.
    nbytes : int
        To grow by.
    send : callable
        Takes a role and the message for it.
    """

    def __init__(self, cycles: int, nbytes: int, send: Callable[[Role, control.Message], None]) -> None:
        self.cycles = cycles
        self.nbytes = nbytes
        self._send = send
        self._left = dict.fromkeys(_ROLES, 2 * cycles)
        self._waiting: set[Role] = set()
        self._made: list[control.Resized] = []
        self.problems: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether every change has been made, or one could not be."""
        return bool(self.problems) or not (any(self._left.values()) or self._waiting)

    def take(self, role: Role, message: control.Message) -> None:
        """Follow what the workers say."""
        if isinstance(message, control.Resized):
            self._waiting.discard(role)
            self._made.append(message)
            if message.error:
                what = "grow" if message.grown else "give back"
                self.problems.append(f"{role} could not {what} under traffic: {message.error}")
        elif isinstance(message, control.Progress) and message.moved:
            for other in _ROLES:
                self._next(other)

    def give_up(self) -> None:
        """Nothing moves any more."""
        if not self.finished:
            left = {role: count for role, count in self._left.items() if count}
            self.problems.append(f"traffic ended before these changes were made: {left}")

    def report(self, *, served_again: int, ended: dict[Any, dict[str, Any]]) -> GrowthReport:
        """What happened, with what the workers reported at their end."""
        return GrowthReport(
            cycles=sum(not message.grown and not message.error for message in self._made) // len(_ROLES),
            nbytes=self.nbytes,
            in_flight=sum(message.in_flight for message in self._made),
            waited_ms=max((message.waited_ms for message in self._made), default=0.0),
            served_again=served_again,
            failed_transfers=sum(
                engine["failed"] for pool in ended.values() for engine in pool.get("transfers", {}).values()
            ),
        )

    def _next(self, role: Role) -> None:
        if role in self._waiting or not self._left[role]:
            return
        grow = self._left[role] % 2 == 0
        self._left[role] -= 1
        self._waiting.add(role)
        self._send(role, control.Grow(self.nbytes, _LIMIT_S) if grow else control.Shrink(_LIMIT_S))
