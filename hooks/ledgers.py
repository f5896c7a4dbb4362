"""The built-in plugin that keeps the transfer ledgers in step with the pool.

Nothing in the lifecycle calls a ledger by name, and `kvarena.transfer` does not know the hooks: this is
the one place where the two meet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from kvarena.errors import KvArenaError
from kvarena.hooks._markers import hookimpl
from kvarena.transfer import BufferInfos, Region, RegistrationLedger

if TYPE_CHECKING:
    from kvarena.hooks.manager import HookManager
    from kvarena.pool import PostCaptureKVResize, UnifiedKVPool
    from kvarena.transfer import TransferEngine

__all__ = ["LedgerKeeper", "backed_regions"]

logger = logging.getLogger(__name__)


@final
class LedgerKeeper:
    """One ledger for each engine, moved whenever the pool's backing moves.

    Parameters
    ----------
    manager : HookManager
        Whose plugins hear of regions.
    engines : sequence of TransferEngine
        Normally the answers to ``kvarena_transfer_engines``.
    """

    plugin_name = "kvarena-ledgers"

    def __init__(self, manager: HookManager, engines: Sequence[TransferEngine] = ()) -> None:
        self._manager = manager
        self._serving = False
        self.ledgers: list[RegistrationLedger] = [
            RegistrationLedger(engine, on_change=self._tell) for engine in engines
        ]

    @hookimpl(tryfirst=True)
    def kvarena_pool_reserved(self, pool: UnifiedKVPool) -> None:
        """Register the sink."""
        self._serving = False
        self._move(pool)

    @hookimpl(tryfirst=True)
    def kvarena_pool_finalized(self, pool: UnifiedKVPool, resize: PostCaptureKVResize) -> None:
        """Register what is backed now; peers may be connected from the second time on."""
        self._move(pool, live=self._serving)
        self._serving = True

    @hookimpl(trylast=True)
    def kvarena_pool_resizing(self, pool: UnifiedKVPool, keep_bytes: int) -> None:
        """Unregister what is about to lose its memory, before it does."""
        if keep_bytes:
            self._move(pool, keep_bytes=keep_bytes, live=self._serving)
            return
        for ledger in self.ledgers:
            ledger.withdraw()

    @hookimpl(trylast=True)
    def kvarena_pool_closing(self, pool: UnifiedKVPool) -> None:
        """Let go of everything, in every engine, also after one has failed."""
        failures: list[KvArenaError] = []
        for ledger in self.ledgers:
            try:
                ledger.clear()
            except KvArenaError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @property
    def registered_bytes(self) -> int:
        """Bytes that the engine with the most has registered."""
        return max((ledger.registered_bytes for ledger in self.ledgers), default=0)

    def _move(self, pool: UnifiedKVPool, *, keep_bytes: int | None = None, live: bool = False) -> None:
        infos, backed = backed_regions(pool)
        if keep_bytes is not None:
            backed = Region(backed.address, min(backed.nbytes, keep_bytes))
        moved: list[tuple[RegistrationLedger, tuple[Region, ...]]] = []
        try:
            for ledger in self.ledgers:
                before = ledger.regions
                ledger.move_to(infos, backed=backed, handle_seams=pool.arena.seams, live=live)
                moved.append((ledger, before))
        except KvArenaError:
            # The ledger that failed has rolled itself back; the ones before it go back too.
            for ledger, before in reversed(moved):
                # Only what is new: peers may be using the rest.
                for region in set(ledger.regions).difference(before):
                    ledger.withdraw(region)
                ledger.restore(before)
            raise

    def _tell(self, change: str, engine: TransferEngine, region: Region) -> None:
        # An observer must not undo a registration that stands: its failure is reported and left.
        for failure in self._manager.call_every(f"kvarena_region_{change}", engine=engine, region=region):
            logger.error("%s", failure)


def backed_regions(pool: UnifiedKVPool) -> tuple[BufferInfos, Region]:
    """What a pool offers for registration, and the bytes that have memory."""
    infos = BufferInfos(*pool.get_contiguous_buf_infos())
    return infos, Region(pool.arena.base, pool.arena.backed_bytes)
