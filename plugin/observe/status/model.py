"""What a process tells of its pool: the shape of a status file, and of the gauges."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from kvarena.transfer.registration.traffic import Histogram

__all__ = [
    "FORMAT",
    "ArenaHistory",
    "EngineStatus",
    "EventMark",
    "PoolLabels",
    "PoolStatus",
    "ProcessIdentity",
    "ProcessStatus",
    "Sample",
    "SubPoolStatus",
]

FORMAT = 1
"""Of the status file; a reader that finds another says so instead of guessing."""


class PoolLabels(msgspec.Struct, frozen=True, kw_only=True):
    """What tells the pools of a deployment apart on a dashboard; empty: not known."""

    role: str = ""
    """``"prefill"``, ``"decode"``, or empty for a server that does both."""
    model: str = ""
    rank: str = ""


Count = Annotated[int, msgspec.Meta(ge=0)]
"""Of bytes, pages and the like: a file that says less is none of ours."""
Unit = Literal["tokens", "requests"]
PoolState = Literal["planned", "reserved", "serving", "eager", "closed"]


class SubPoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of KV in the arena."""

    name: str
    unit: Unit
    """What a slot holds: a token, or the state of a request (Mamba)."""
    grow_direction: str
    page_bytes: Count
    slots_per_page: Count
    num_pages: Count
    """Pages that could be allocated if no other sub-pool held any; the sink's are not among them."""
    live_pages: Count | None = None
    """None: the engine has not said."""
    free_pages: Count | None = None

    @property
    def live_bytes(self) -> int:
        """Bytes of the pages in use, as far as they are known."""
        return (self.live_pages or 0) * self.page_bytes


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer engine, and what it has registered."""

    name: str
    registered_bytes: Count
    regions: tuple[tuple[int, Count], ...]
    """Offset in the arena and bytes of each."""
    epoch: Count
    in_flight: Count
    """Transfers, or leases granted, that have not ended."""
    transfers: Count = 0
    """Submitted so far."""
    transferred_bytes: Count = 0
    failures: Count = 0
    received_bytes: Count = 0
    """Bytes of the pages that peers have written here."""
    peers: dict[str, Count] = {}
    """Transfers submitted for each peer."""
    transfer_seconds: Histogram | None = None
    transfer_sizes: Histogram | None = None
    """Bytes of each transfer."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pool as it is now. Sizes are bytes."""

    state: PoolState
    device: str = ""
    driver: str = ""
    base: Count = 0
    reserved_bytes: Count = 0
    backed_bytes: Count = 0
    active_bytes: Count = 0
    """Backed bytes that the pool uses: its final size, or the sink before that."""
    sink_bytes: Count = 0
    handle_bytes: tuple[Count, ...] = ()
    """Of each physical handle, in the order of addresses."""
    page_size: Count = 1
    tokens: Count | None = None
    """Tokens that the pool is sized for, by its attention sub-pools alone."""
    requests: Count | None = None
    """Requests whose states fit; None where the model has none."""
    torch_cached_bytes: Count | None = None
    """Free blocks that torch keeps on the device, which no driver call can see."""
    sub_pools: tuple[SubPoolStatus, ...] = ()
    engines: tuple[EngineStatus, ...] = ()

    @property
    def registered_bytes(self) -> int:
        """Of the engine that has registered most."""
        return max((engine.registered_bytes for engine in self.engines), default=0)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """The arena at one moment."""

    at_s: float
    backed_bytes: Count
    active_bytes: Count
    registered_bytes: Count
    handle_bytes: tuple[Count, ...]
    """Of each handle in the order of addresses; the last entry holds all that are beyond the first 63."""
    live_bytes: tuple[Count, ...]
    """Of each sub-pool of the history."""
    handles: Count = 0
    """How many there were."""


class EventMark(msgspec.Struct, frozen=True, array_like=True):
    """A decision, at its moment."""

    at_s: float
    name: str
    nbytes: Count | None = None
    milliseconds: float = 0.0


class ArenaHistory(msgspec.Struct, kw_only=True):
    """An arena over time: what a picture is drawn from."""

    title: str
    began_at: float
    """Seconds since 1970."""
    reserved_bytes: Count = 0
    sink_bytes: Count = 0
    sub_pools: tuple[tuple[str, str], ...] = ()
    """Name and grow direction of each, in the order along the arena."""
    samples: list[Sample] = []
    events: list[EventMark] = []


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to say later whether a process is still the same one."""

    pid: int
    started: int
    """Clock ticks between the machine's boot and the process's start: a reused pid has another."""
    boot_id: str
    pid_namespace: int
    """In another namespace (a container's) the pid means another process, or none."""
    time_namespace: int = 0
    """In another namespace the same process has another `started`; 0: unknown."""
    parent_pid: int = 0
    """0: outside the namespace, or unknown."""
    parent_started: int = 0


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one process writes into its status file."""

    format: int = FORMAT
    identity: ProcessIdentity
    name: str
    """What the process calls itself: ``"decode"``, ``"sglang tp0"``, ..."""
    written_at: float
    pool: PoolStatus
    locked: bool = False
    """Whether its process holds a lock on the file, which ends with the process."""
    labels: PoolLabels = PoolLabels()
    refusals: tuple[str, ...] = ()
    """Codes of the reasons why the pool is not sized after capture."""
    metrics_address: str | None = None
    """``host:port`` of its metrics."""
    history: ArenaHistory | None = None
