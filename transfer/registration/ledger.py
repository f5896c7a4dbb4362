"""What one engine has registered, and how to get from there to what it should have."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

from kvarena.transfer.errors import RegistrationError
from kvarena.transfer.protocol import BufferInfos, Region, TransferEngine
from kvarena.transfer.registration.gate import Quiesce
from kvarena.transfer.registration.regions import (
    PastBacked,
    coalesce,
    overlapping,
    plan_regions,
    seams_between,
    subtract,
)
from kvarena.transfer.registration.traffic import Traffic

__all__ = ["Change", "Listener", "RegistrationLedger"]

log = logging.getLogger(__name__)

Change = Literal["registered", "unregistered"]
Listener = Callable[[Change, TransferEngine, Region], None]


class RegistrationLedger:
    """The record of one engine's registrations; the only one who registers arena memory with it.

    A move is a transaction: it ends with the new set, or with the previous one. If even that
    cannot be restored, the record says what the engine still holds and the error says what was lost.

    Parameters
    ----------
    engine : TransferEngine
        Whose registrations these are.
    on_change : callable, optional
        Called with ``"registered"`` or ``"unregistered"``, the engine and the region, after the move
        in which it happened. One that raises is logged and changes nothing.
    gate : Quiesce, optional
        Closed while regions that peers may be using are replaced.
    """

    def __init__(
        self, engine: TransferEngine, *, on_change: Listener | None = None, gate: Quiesce | None = None
    ) -> None:
        self.engine = engine
        self.gate = gate or Quiesce()
        self.traffic = Traffic()
        self._on_change = on_change
        self._lock = threading.RLock()
        self._held: dict[int, Region] = {}
        self._snapshot: tuple[Region, ...] = ()
        self._events: list[tuple[Change, Region]] = []
        self._epoch = 0

    @property
    def regions(self) -> tuple[Region, ...]:
        """What the engine holds, in ascending order."""
        return self._snapshot

    @property
    def registered_bytes(self) -> int:
        """The sum over the regions."""
        return sum(region.nbytes for region in self._snapshot)

    @property
    def epoch(self) -> int:
        """Grows with every move that touched the engine; a peer with an older one must connect again."""
        return self._epoch

    @property
    def seams(self) -> tuple[int, ...]:
        """Addresses that no single transfer may cross; none when the engine crosses seams."""
        return () if self.engine.capabilities.crosses_seams else seams_between(self._snapshot)

    def move_to(
        self,
        infos: BufferInfos | Sequence[Region],
        *,
        backed: Region,
        handle_seams: Sequence[int] = (),
        live: bool = False,
        past_backed: PastBacked = "clip",
        quiesce_timeout: float = 30.0,
    ) -> None:
        """Register exactly these bytes, and nothing else.

        Parameters
        ----------
        infos : BufferInfos or sequence of Region
            What a pool reports; aliases, overlaps and empty entries are welcome.
        backed : Region
            The bytes that have memory: nothing outside is ever registered.
        handle_seams : sequence of int
            Absolute addresses where two physical handles meet.
        live : bool
            Peers may be connected. What stays is then left alone and growth becomes a region of its
            own; where the engine cannot do that, the gate is closed and everything is replaced.
        past_backed : {"clip", "refuse"}
            What happens to a region that ends past backed memory.
        quiesce_timeout : float
            Seconds to wait for transfers in flight, where they must end first.

        Raises
        ------
        RegistrationError
            The wish or the engine was at fault; the previous regions are registered again.
        QuiesceTimeout
            Transfers did not end in time; nothing was touched.
        """
        target = plan_regions(
            infos,
            backed=backed,
            capabilities=self.engine.capabilities,
            engine=self.engine.name,
            handle_seams=handle_seams,
            past_backed=past_backed,
        )
        with self._transaction():
            drop, add, must_wait = self._steps(target, live)
            if drop or add:
                with self.gate.closed(quiesce_timeout) if must_wait else nullcontext():
                    self._apply(drop, add)

    def withdraw(self, within: Region | None = None) -> tuple[Region, ...]:
        """Unregister every region that touches these bytes, before their memory is taken or replaced.

        Returns what was unregistered, for `restore`.
        """
        with self._transaction():
            taken = tuple(r for r in self._snapshot if within is None or overlapping(r, [within]))
            self._apply(taken, ())
        return taken

    def restore(self, regions: Sequence[Region]) -> None:
        """Register again what `withdraw` took, when the memory is as it was."""
        with self._transaction():
            self._apply((), tuple(r for r in regions if r.address not in self._held))

    def clear(self) -> None:
        """Unregister everything, as far as possible.

        Raises
        ------
        RegistrationError
            The first refusal; `regions` then still names what the engine holds, and that memory
            must stay.
        """
        with self._transaction():
            first: RegistrationError | None = None
            touched = bool(self._held)
            for region in self._snapshot:
                try:
                    self._take(region)
                except RegistrationError as error:
                    first = first or error
            self._epoch += touched
            if first is not None:
                raise first

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """One move at a time; who listens is told afterwards, when the record is settled."""
        events: list[tuple[Change, Region]] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    events, self._events = self._events, []
                    self._snapshot = tuple(sorted(self._held.values()))
        finally:
            for change, region in events:
                self._tell(change, region)

    def _tell(self, change: Change, region: Region) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(change, self.engine, region)
        except Exception:  # a listener of anybody's must not undo a registration
            log.exception("%s: a listener failed on %s %s", self.engine.name, change, region)

    def _steps(
        self, target: tuple[Region, ...], live: bool
    ) -> tuple[tuple[Region, ...], tuple[Region, ...], bool]:
        """What to unregister, what to register, and whether transfers must have ended first."""
        held = self._snapshot
        if live and self.engine.capabilities.live_reregistration:
            union = coalesce(target)
            keep = tuple(r for r in held if not subtract([r], union))
            drop = tuple(r for r in held if r not in keep)
            if not any(overlapping(r, union) for r in drop):
                return drop, subtract(target, keep), False
        add = tuple(r for r in target if self._held.get(r.address) != r)
        drop = tuple(r for r in held if r not in target)
        return drop, add, live

    def _apply(self, drop: Sequence[Region], add: Sequence[Region]) -> None:
        undo: list[tuple[Callable[[Region], None], Region]] = []
        try:
            for region in drop:
                self._take(region)
                undo.append((self._put, region))
            for region in add:
                self._put(region)
                undo.append((self._take, region))
        except BaseException as error:
            lost = self._undo(undo)
            if lost and isinstance(error, RegistrationError):
                raise error.losing(lost) from error
            raise
        finally:
            # A rollback counts as well: the regions are new ones to the engine, and old keys are stale.
            self._epoch += bool(undo)

    def _undo(self, steps: list[tuple[Callable[[Region], None], Region]]) -> list[Region]:
        lost: list[Region] = []
        for step, region in reversed(steps):
            try:
                step(region)
            except RegistrationError:
                log.exception("%s: rollback failed", self.engine.name)
                if step == self._put:
                    lost.append(region)
        return lost

    def _put(self, region: Region) -> None:
        self._call("register", region)
        self._held[region.address] = region
        self._events.append(("registered", region))

    def _take(self, region: Region) -> None:
        try:
            self._call("unregister", region)
        except RegistrationError as error:
            if not error.unknown:
                raise
            # Somebody else took it away: what was wanted is so, and the record must say it.
            log.warning("%s", error)
        del self._held[region.address]
        self._events.append(("unregistered", region))

    def _call(self, action: Literal["register", "unregister"], region: Region) -> None:
        try:
            (self.engine.register if action == "register" else self.engine.unregister)([region])
        except RegistrationError:
            raise
        except Exception as error:  # an engine of anybody's
            raise RegistrationError(
                self.engine.name, region, type(error).__name__, action=action, meaning=str(error)
            ) from error
