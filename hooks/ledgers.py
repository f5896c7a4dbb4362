"""The built-in plugin that keeps the transfer ledgers of one pool in step with it.

Nothing in the lifecycle calls a ledger by name, and `kvarena.transfer` does not know the hooks: this is
the one place where the two meet.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from kvarena.hooks._markers import hookimpl
from kvarena.pool.transaction import add_note
from kvarena.transfer import Region, RegistrationLedger

if TYPE_CHECKING:
    from kvarena.hooks.manager import HookManager
    from kvarena.pool import PostCaptureKVResize, ResizablePool
    from kvarena.transfer import TransferEngine

__all__ = ["Follower", "LedgerKeeper"]

logger = logging.getLogger(__name__)


class Follower:
    """What goes along with one ledger of a `LedgerKeeper`; override what is needed."""

    def moved(self, ledger: RegistrationLedger) -> None:
        """The engine has registered what is backed now; what this raises counts as its refusal."""

    def withdrawing(self, ledger: RegistrationLedger) -> None:
        """Everything is about to be unregistered."""

    def closing(self, ledger: RegistrationLedger) -> None:
        """The pool closes; of its memory nothing is registered here any more."""

    def failed(self, ledger: RegistrationLedger, error: Exception) -> None:
        """The engine, or `moved`, failed. Raises it, which undoes the change of the pool.

        An engine that the pool can do without stops here instead, and lets go of its regions.
        """
        raise error

    def details(self) -> Mapping[str, Any]:
        """What else to say of the registrations."""
        return {}


@final
class LedgerKeeper:
    """One ledger for each engine that knows a pool, moved whenever the pool's backing moves.

    Engines come and go with `add` and `remove` while the pool lives. Hooks of other pools are not its
    business.

    Parameters
    ----------
    manager : HookManager
        Whose plugins hear of regions.
    pool : ResizablePool
        What is registered.
    """

    plugin_name = "kvarena-ledgers"

    def __init__(self, manager: HookManager, pool: ResizablePool) -> None:
        self._manager = manager
        self._pool = pool
        self._serving = False
        self._kept: list[tuple[RegistrationLedger, Follower]] = []

    def attach(self) -> bool:
        """Begin to hear of the pool. False: somebody has blocked the plugin."""
        if self._manager.is_blocked(self.plugin_name):
            return False
        taken = self._manager.has_plugin(self.plugin_name)  # by the keeper of another pool
        name = f"{self.plugin_name}-{id(self):x}" if taken else self.plugin_name
        return self._manager.register(self, name) is not None

    def detach(self) -> None:
        """Hear no more; a second call does nothing."""
        if self._manager.is_registered(self):
            self._manager.unregister(self)
        self._kept.clear()

    @property
    def ledgers(self) -> tuple[RegistrationLedger, ...]:
        """As they stand."""
        return tuple(ledger for ledger, _ in self._kept)

    def ledger_for(self, engine: TransferEngine) -> RegistrationLedger:
        """A ledger whose changes plugins hear of; nothing is registered, and nobody keeps it yet."""
        return RegistrationLedger(engine, on_change=self._tell)

    def add(
        self, engine: TransferEngine, follower: Follower | None = None, *, register: bool = True
    ) -> RegistrationLedger:
        """Keep a ledger for one more engine.

        Parameters
        ----------
        engine : TransferEngine
            Who registers.
        follower : Follower, optional
            What goes along.
        register : bool
            Whether to `register` now; else the next change of the pool does.

        Raises
        ------
        RegistrationError
            The engine refused; it is not kept.
        """
        ledger = self.ledger_for(engine)
        self._kept.append((ledger, follower or Follower()))
        if register:
            try:
                self.register(ledger)
            except BaseException as error:
                try:
                    self.remove(ledger)
                except Exception as second:  # noqa: BLE001 - kept, with what the engine holds
                    add_note(error, f"this failed too: {second}")
                raise
        return ledger

    def register(self, ledger: RegistrationLedger) -> None:
        """Register what is backed now with one engine.

        Raises
        ------
        RegistrationError
            The engine refused.
        """
        for kept, follower in self._kept:
            if kept is ledger:
                self._move_one(ledger)
                follower.moved(ledger)

    def remove(self, ledger: RegistrationLedger) -> None:
        """Unregister everything of one engine and forget it; a second call does nothing.

        Raises
        ------
        RegistrationError
            The engine refused: it is kept, and the memory of what it still holds must stay.
        """
        for kept, follower in self._kept:
            if kept is ledger:
                follower.withdrawing(ledger)
                ledger.clear()
                self._kept.remove((kept, follower))
                return

    def details_of(self, ledger: RegistrationLedger) -> Mapping[str, Any]:
        """What the follower of a ledger says of it."""
        return next((follower.details() for kept, follower in self._kept if kept is ledger), {})

    @hookimpl(tryfirst=True)
    def kvarena_pool_reserved(self, pool: ResizablePool) -> None:
        """Register the sink."""
        if pool is self._pool:
            self._serving = False
            self._move()

    @hookimpl(tryfirst=True)
    def kvarena_pool_finalized(self, pool: ResizablePool, resize: PostCaptureKVResize) -> None:
        """Register what is backed now; peers may be connected from the second time on."""
        if pool is self._pool:
            self._move(live=self._serving)
            self._serving = True

    @hookimpl(trylast=True)
    def kvarena_pool_resizing(self, pool: ResizablePool, keep_bytes: int) -> None:
        """Unregister what is about to lose its memory, before it does."""
        if pool is not self._pool:
            return
        if keep_bytes:
            self._move(keep_bytes=keep_bytes, live=self._serving)
            return
        self._let_go()

    @hookimpl(trylast=True)
    def kvarena_pool_closing(self, pool: ResizablePool) -> None:
        """Let go of everything, in every engine, also after one has failed."""
        if pool is self._pool:
            self._let_go(closing=True)

    @property
    def registered_bytes(self) -> int:
        """Bytes that the engine with the most has registered."""
        return max((ledger.registered_bytes for ledger in self.ledgers), default=0)

    def _move(self, *, keep_bytes: int | None = None, live: bool = False) -> None:
        moved: list[tuple[RegistrationLedger, tuple[Region, ...]]] = []
        for ledger, follower in tuple(self._kept):
            before = ledger.regions
            try:
                self._move_one(ledger, keep_bytes=keep_bytes, live=live)
                moved.append((ledger, before))
                follower.moved(ledger)
            except Exception as error:  # noqa: BLE001 - raised again, unless the follower lets it be
                try:
                    follower.failed(ledger, error)
                except Exception:
                    _take_back(moved)
                    raise
                if (ledger, before) in moved:
                    moved.remove((ledger, before))

    def _move_one(
        self, ledger: RegistrationLedger, *, keep_bytes: int | None = None, live: bool = False
    ) -> None:
        regions = [region for region in self._pool.backed_regions(keep_bytes) if region.backed_bytes]
        if not regions:
            ledger.withdraw()
            return
        backed = [Region(region.address, region.backed_bytes) for region in regions]
        start = min(region.address for region in backed)
        ledger.move_to(
            backed,
            backed=Region(start, max(region.end for region in backed) - start),
            handle_seams=[seam for region in regions for seam in region.seams],
            live=live,
        )

    def _let_go(self, *, closing: bool = False) -> None:
        failures: list[Exception] = []
        for ledger, follower in tuple(self._kept):
            try:
                follower.withdrawing(ledger)
                ledger.clear()
                if closing:
                    follower.closing(ledger)
            except Exception as error:  # noqa: BLE001 - the other engines must let go, too
                failures.append(error)
        if failures:
            raise failures[0]

    def _tell(self, change: str, engine: TransferEngine, region: Region) -> None:
        # An observer must not undo a registration that stands: its failure is reported and left.
        for failure in self._manager.call_every(f"kvarena_region_{change}", engine=engine, region=region):
            logger.error("%s", failure)


def _take_back(moved: Sequence[tuple[RegistrationLedger, tuple[Region, ...]]]) -> None:
    """The ledger that failed has rolled itself back; the ones before it go back too."""
    for ledger, before in reversed(moved):
        # Only what is new: peers may be using the rest.
        for region in set(ledger.regions).difference(before):
            ledger.withdraw(region)
        ledger.restore(before)
