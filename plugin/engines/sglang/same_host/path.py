"""One Mooncake engine object's second way out: copies into the arenas of peers on this host."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt
from kvarena.errors import KvArenaError
from kvarena.hooks.ledgers import Follower
from kvarena.plugin.closing import failures_of
from kvarena.plugin.engines.sglang.runtime import logger
from kvarena.plugin.engines.sglang.same_host.card import Card, name_of
from kvarena.plugin.engines.sglang.same_host.route import Reach, Route
from kvarena.pool.transaction import add_note
from kvarena.transfer import Region, RegistrationLedger, SameHostEngine, TransferTimeout
from kvarena.transfer.protocol import Int64
from kvarena.transfer.registration.traffic import Traffic

if TYPE_CHECKING:
    from kvarena.plugin.config import Settings
    from kvarena.plugin.engines.sglang.bound import SglangPool

__all__ = ["SameHostPath"]

Mooncake = Callable[[list[int], list[int], list[int]], int]
"""SGLang's own call for a part of a batch, with its return code."""

# What Mooncake waits at most, unless MC_TRANSFER_TIMEOUT says otherwise. A copy that takes as long is
# stuck behind a device that hangs.
_LONGEST_COPY_SECONDS = 30.0
_FAILED = -1


@final
class SameHostPath(Follower):
    """The same-host engine of one arena, reached by a Mooncake session's name. Any thread may transfer.

    Writes go to addresses, as SGLang's protocol has them: its decode side leases pages by sending
    their ids, and names no lease to us. So what is checked here is what Mooncake checks, too: that source
    and destination lie in registered memory.

    Parameters
    ----------
    bound : SglangPool
        Whose arena is served, in both directions.
    session : str
        Ours, as peers know it.
    mooncake : Traffic
        Counts what Mooncake carries.
    settings : Settings
        Where sockets lie, and how long a peer may be silent.
    sends : bool
        Compile the copy kernel now instead of in the first request.
    """

    def __init__(
        self, bound: SglangPool, session: str, mooncake: Traffic, settings: Settings, *, sends: bool
    ) -> None:
        self.session = session
        self._mooncake = mooncake
        self._timeout = max(settings.transfer_timeout, _LONGEST_COPY_SECONDS)
        self._identity = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._routes: dict[str, Route] = {}
        self._events: list[Any] = []
        self._card: Card | None = None
        directory = None if settings.socket_dir is None else Path(settings.socket_dir)
        self._engine = SameHostEngine(
            bound.arena,
            name=name_of(session),
            directory=directory,
            connect_timeout=settings.transfer_timeout,
            drain_timeout=self._timeout,
        )
        self._directory = self._engine.socket_path.parent
        self._bound = bound
        self.ledger = bound.keeper.add(self._engine, self, register=False)
        try:
            if sends:
                self._engine.prepare(max(bound.page_bytes(spec.name) for spec in bound.sub_pool_specs))
            with bound.announce.noting_registrations():
                bound.keeper.register(self.ledger)
        except BaseException as error:
            for second in failures_of(self.close, "the same-host path"):
                add_note(error, f"this failed too: {second}")
            raise

    @property
    def socket_path(self) -> Path:
        """Where peers reach the engine."""
        return self._engine.socket_path

    def moved(self, ledger: RegistrationLedger) -> None:
        """Tell peers what is exported now."""
        card = Card.of(self.session, self._identity, self._engine.describe(), ledger.regions)
        card.write(self._directory)
        self._card = card

    def withdrawing(self, ledger: RegistrationLedger) -> None:
        """First, so that a peer whose copy is refused sees that nothing is wrong here."""
        if self._card is not None:
            self._card.remove(self._directory)
            self._card = None

    def failed(self, ledger: RegistrationLedger, error: Exception) -> None:
        """The path ends, and the server goes on without it."""
        if not isinstance(error, (KvArenaError, OSError)):
            raise error
        logger.warning("kvarena: the same-host path ends here, Mooncake carries everything: %s", error)
        self.close()

    def closing(self, ledger: RegistrationLedger) -> None:
        """Stop listening."""
        self._engine.close()

    def details(self) -> dict[str, Any]:
        """How peers find it."""
        return {"session": self.session, "socket": str(self._engine.socket_path)}

    def await_event(self, event: Any) -> None:
        """No transfer that begins from now on reads memory before this CUDA event has come."""
        with self._lock:
            self._events.append(event)

    def transfer(
        self,
        mooncake: Mooncake,
        session: str,
        buffers: Sequence[int],
        peer_buffers: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Write a batch; returns when all of it is there, or some of it cannot be.

        On return nothing that was started here still writes, but for a copy on a device that hangs;
        then the code is never 0.

        Returns
        -------
        int
            0, or Mooncake's code.
        """
        self._wait_for_events()
        reach = self._route(session).reach()
        columns = None if reach is None else _columns(buffers, peer_buffers, lengths)
        if reach is None or columns is None:
            return self._by_mooncake(mooncake, list(buffers), list(peer_buffers), list(lengths))
        src, dst, counts = columns
        fast = _within(src, counts, self.ledger.regions) & _within(dst, counts, reach.regions)
        if not fast.any():
            return self._by_mooncake(mooncake, list(buffers), list(peer_buffers), list(lengths))
        mapped = src[fast], dst[fast], counts[fast]
        rest = [column[~fast].tolist() for column in columns]
        return self._both(mooncake, session, reach, mapped, rest)

    def close(self) -> None:
        """Unregister and stop listening; a second call does nothing.

        Raises
        ------
        RegistrationError, QuiesceTimeout
            A copy of ours has not ended: the memory must stay.
        """
        self._bound.keeper.remove(self.ledger)
        self._engine.close()

    def _both(
        self,
        mooncake: Mooncake,
        session: str,
        reach: Reach,
        mapped: tuple[Int64, Int64, Int64],
        rest: list[list[int]],
    ) -> int:
        """Start the copies, let Mooncake carry the rest meanwhile, and wait for both."""
        traffic = self.ledger.traffic
        traffic.submitted()
        pending = None
        code = 0
        failure: Exception | None = None
        # SGLang's transfer thread, and with it the server, would end with an exception of any kind.
        try:
            pending = self._engine.submit(reach.key, *mapped)
        except Exception as error:  # noqa: BLE001
            failure = error
        try:
            if rest[0]:
                code = self._by_mooncake(mooncake, *rest)
        finally:
            # Whatever happens to the rest: who is told of an end must be able to reuse the pages.
            if pending is not None:
                try:
                    pending.wait(self._timeout)
                except Exception as error:  # noqa: BLE001
                    failure = error
        if failure is None:
            traffic.ended(int(mapped[2].sum()))
            return code
        traffic.failed()
        self._route(session).failed(reach, failure)
        if pending is not None and _flies(pending):
            logger.error(
                "kvarena: a copy to session %s has not ended after %g s, the device may hang: %s",
                session,
                self._timeout,
                failure,
            )
            return _FAILED
        if code != 0:
            return code
        return self._by_mooncake(mooncake, *(column.tolist() for column in mapped))

    def _by_mooncake(self, mooncake: Mooncake, src: list[int], dst: list[int], lengths: list[int]) -> int:
        self._mooncake.submitted()
        code = mooncake(src, dst, lengths)
        if code == 0:
            self._mooncake.ended(sum(lengths))
        else:
            self._mooncake.failed()
        return code

    def _route(self, session: str) -> Route:
        route = self._routes.get(session)
        if route is None:
            with self._lock:
                route = self._routes.get(session)
                if route is None:
                    route = self._routes[session] = Route(self._engine, self._directory, session)
        return route

    def _wait_for_events(self) -> None:
        if not self._events:
            return
        with self._lock:
            events = tuple(self._events)
        for event in events:
            event.synchronize()
        with self._lock:
            # Another thread may have waited for some of them, too.
            self._events = [event for event in self._events if event not in events]


def _columns(*given: Sequence[int]) -> tuple[Int64, Int64, Int64] | None:
    """Sources, destinations and lengths; None: what Mooncake should see and refuse itself."""
    try:
        src, dst, counts = (np.asarray(column, np.int64) for column in given)
    except (OverflowError, TypeError, ValueError):
        return None
    if src.ndim != 1 or not src.shape == dst.shape == counts.shape or (counts < 0).any():
        return None
    return src, dst, counts


def _within(starts: Int64, lengths: Int64, regions: Sequence[Region]) -> npt.NDArray[np.bool_]:
    """Which ranges lie wholly in one region."""
    inside = np.zeros(starts.shape, np.bool_)
    for region in regions:
        inside |= (starts >= region.address) & (lengths <= region.end - starts)
    return inside


def _flies(pending: Any) -> bool:
    """Whether a copy may still write."""
    try:
        pending.wait(0.0)
    except TransferTimeout:
        return True
    except Exception:  # noqa: BLE001 - it has ended, however badly
        return False
    return False
