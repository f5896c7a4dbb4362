"""What happened to a pool, when, and to how many bytes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final

__all__ = ["Event", "Timeline"]

logger = logging.getLogger("kvarena")

#: How it came to serve, and what happened lately; a pool that grows and shrinks all day has more events.
_FIRST_EVENTS: Final = 200
_LAST_EVENTS: Final = 800


@dataclass(frozen=True)
class Event:
    """One decision in a pool's life."""

    name: str
    """``reserved``, ``sink``, ``captured``, ``budget``, ``finalized``, ``registered``, ``grown``, ..."""
    nbytes: int | None
    address: int | None
    milliseconds: float | None
    """How long it took; None: it was not timed."""
    at_s: float
    """Seconds since the timeline began."""
    details: dict[str, Any] = field(default_factory=dict)


@final
class Timeline:
    """Keeps the first and the latest events of one pool, and logs one line for each, with stable keys."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        """The first 200, and the latest 800 of those that followed."""
        self.listeners: list[Callable[[Event], None]] = []
        """Called with each event, on the thread that made the decision; what they raise is logged only."""
        self.began_at = time.time()
        """Seconds since 1970, to lay timelines of several processes over each other."""
        self._began = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the timeline began."""
        return time.perf_counter() - self._began

    def add(
        self,
        name: str,
        *,
        nbytes: int | None = None,
        address: int | None = None,
        milliseconds: float | None = None,
        level: int = logging.INFO,
        **details: Any,
    ) -> Event:
        """Record an event that has ended; its line is logged at `level`."""
        event = Event(name, nbytes, address, milliseconds, self.now_s, details)
        self.events.append(event)
        if len(self.events) > _FIRST_EVENTS + _LAST_EVENTS:
            del self.events[_FIRST_EVENTS]
        fields = {"bytes": nbytes, "address": None if address is None else hex(address)} | details
        fields["ms"] = None if milliseconds is None else f"{milliseconds:.3f}"
        text = "".join(f" {key}={_quoted(value)}" for key, value in fields.items() if value is not None)
        logger.log(level, "kvarena: %s%s", name, text)
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:  # an observer must not undo what it observes
                logger.debug("kvarena: a listener failed at the event %s", name, exc_info=True)
        return event

    @contextmanager
    def timed(self, name: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Time a block; what it puts into the yielded dictionary becomes part of the event."""
        found: dict[str, Any] = dict(details)
        began = time.perf_counter()
        yield found
        self.add(name, milliseconds=(time.perf_counter() - began) * 1e3, **found)

    def as_dicts(self) -> list[dict[str, Any]]:
        """The events as plain dictionaries, for JSON and for messages between processes."""
        return [asdict(event) for event in self.events]


def _quoted(value: object) -> str:
    """Values with spaces in quotes, so that a line can be taken apart at spaces."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or '"' in text else text
