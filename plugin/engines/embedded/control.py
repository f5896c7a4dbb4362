"""Every message between the processes of the embedded engine.

The client (the demo's parent process) talks to each worker; a prefill worker talks to its decode
worker. KV never travels here.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.plugin.observe.status.model import ArenaHistory

__all__ = [
    "TO_CLIENT",
    "TO_DECODE",
    "TO_PREFILL",
    "TO_WORKER",
    "Abort",
    "Cancel",
    "Channel",
    "CompareEager",
    "Connect",
    "Connected",
    "Eager",
    "Finished",
    "Generate",
    "Grow",
    "Join",
    "Leaving",
    "Message",
    "Online",
    "Ping",
    "Prefill",
    "PrefillDone",
    "PrefillFailed",
    "Progress",
    "Ready",
    "Refused",
    "Resized",
    "Shrink",
    "Stop",
    "Stopped",
    "Welcome",
]


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Online(_Message, frozen=True):
    """Worker to client: the process runs."""

    pid: int


class Progress(_Message, frozen=True):
    """Worker to client: a line about what it does."""

    what: str
    moved: bool = False
    """Whether the line says that a prompt's pages have been moved."""


class Ready(_Message, frozen=True):
    """Worker to client: the pool is finalized."""

    address: str | None
    """Where a decode worker listens for prefill workers."""
    pool: dict[str, Any]
    """What the engine reports of its pool."""


class Connect(_Message, frozen=True):
    """Client to prefill: serve the decode worker at this address."""

    address: str


class Connected(_Message, frozen=True):
    """Prefill to client: the handshake succeeded."""


class Generate(_Message, frozen=True):
    """Client to decode (or to the reference): a request."""

    request: Request


class Cancel(_Message, frozen=True):
    """Client to decode: the answer is no longer wanted."""

    rid: int


class Grow(_Message, frozen=True):
    """Client to either: grow the pool by so many bytes, while requests are served."""

    nbytes: int
    limit_s: float = 10.0
    """How long to try."""


class Shrink(_Message, frozen=True):
    """Client to either: give back the bytes of the last growth, once no page there is in use."""

    limit_s: float = 10.0
    """How long to try."""


class Resized(_Message, frozen=True):
    """Either to the client: a change of the pool's size has been made, or could not be."""

    grown: bool
    """Whether it was asked to grow, rather than to give back."""
    total_bytes: int
    """Of the pool now."""
    in_flight: int
    """Leases and transfers that were out at that moment."""
    tries: int
    waited_ms: float
    """Until what stood in the way had ended."""
    milliseconds: float
    """That the change itself took."""
    error: str
    """Why it could not be made; the pool has then kept its size."""


class Finished(_Message, frozen=True):
    """Decode to client: a request's answer or error."""

    result: Result


class CompareEager(_Message, frozen=True):
    """Client to reference: what does an eager pool of so many bytes expose?"""

    total_bytes: int


class Eager(_Message, frozen=True):
    """Reference to client: the answer."""

    total_bytes: int
    capacities: dict[str, int]


class Stop(_Message, frozen=True):
    """Client to worker: end, and report."""


class Stopped(_Message, frozen=True):
    """Worker to client: the last message before the process ends."""

    error: str
    """Why it ends without having been told to; empty otherwise."""
    refused: bool
    """Whether the settings are the cause, rather than something that happened."""
    pool: dict[str, Any]
    history: ArenaHistory | None = None
    """The worker's arena over time, for a picture."""


class Join(_Message, frozen=True):
    """Prefill to decode: may I write into your pool?"""

    pages: bytes
    """What the page channel says of this side: manifest, engine, registration."""
    model: str


class Welcome(_Message, frozen=True):
    """Decode to prefill: yes, and this is how; sent again after each registration."""

    pages: bytes
    model: str


class Refused(_Message, frozen=True):
    """Either to the other: no transfer between us, and why."""

    what: str
    may_still_write: bool = True
    """Whether a write that was begun before can still be under way."""


class Leaving(_Message, frozen=True):
    """Either to the other: I was told to end; what is not answered yet will not be."""

    may_still_write: bool = True
    """Whether a write that was begun before can still be under way."""


class Prefill(_Message, frozen=True):
    """Decode to prefill: compute this prompt and write its pages into mine."""

    request: Request
    lease: bytes
    """The receiver's permission, with the physical pages of each sub-pool in the sequence's order."""


class PrefillDone(_Message, frozen=True):
    """Prefill to decode: every page is written."""

    rid: int
    serial: int
    """Of the lease."""
    written: dict[str, int]
    """Pages that were written into each sub-pool."""
    token: int
    logit: float
    margin: float


class PrefillFailed(_Message, frozen=True):
    """Prefill to decode: there will be no KV."""

    rid: int
    what: str
    may_still_write: bool
    """Whether a write into the leased pages can still be under way."""


class Abort(_Message, frozen=True):
    """Decode to prefill: drop the request; answered by `PrefillFailed` once nothing writes any more."""

    rid: int


class Ping(_Message, frozen=True):
    """Either to the other: a sign of life."""


# What may be sent in each direction: nothing else is decoded.
_ToClient = Online | Progress | Ready | Connected | Refused | Finished | Eager | Resized | Stopped
_ToWorker = Connect | Generate | Cancel | CompareEager | Grow | Shrink | Stop
_ToDecode = Join | Refused | Leaving | PrefillDone | PrefillFailed | Ping
_ToPrefill = Welcome | Refused | Leaving | Prefill | Abort | Ping

Message = _ToClient | _ToWorker | _ToDecode | _ToPrefill


class Channel(msgspec.Struct, frozen=True):
    """One direction of a control connection."""

    name: str
    messages: Any
    """The union of the kinds of messages that it carries."""
    max_bytes: int
    """Of one message; the transport ends a connection that announces more (``ZMQ_MAXMSGSIZE``)."""
    max_queued: int
    """Received messages that wait for the receiver; beyond that the sender waits (``ZMQ_RCVHWM``)."""


# A prompt has at most 3 bytes a token here, a leased page 9: far less than 16 MiB. A worker's last message
# has its arena's history.
TO_CLIENT: Final = Channel("from a worker", _ToClient, 64 << 20, 256)
TO_WORKER: Final = Channel("from a client", _ToWorker, 16 << 20, 1024)
TO_DECODE: Final = Channel("from a prefill worker", _ToDecode, 1 << 20, 64)
TO_PREFILL: Final = Channel("from a decode worker", _ToPrefill, 16 << 20, 64)
