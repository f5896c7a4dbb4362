"""Who hears of a pool's size, and of its undoing: plugins (the ledgers too), the timeline and the status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from kvarena.plugin.closing import raise_first

if TYPE_CHECKING:
    from kvarena.hooks import HookManager
    from kvarena.plugin.observe.status.reporter import StatusReporter
    from kvarena.plugin.observe.timeline import Timeline
    from kvarena.pool import PostCaptureKVResize, UnifiedKVPool
    from kvarena.pool.transaction import Transaction
    from kvarena.transfer import RegistrationLedger

__all__ = ["Announcements", "size_of"]


@final
class Announcements:
    """Of one pool's life. What raises here was refused by a plugin; `again_*` ask every plugin all the same.

    Parameters
    ----------
    manager : HookManager
        Of the plugins.
    timeline : Timeline
        Gets an event for each engine whose registrations have changed.
    reporter : StatusReporter
        Shows the size.
    ledgers : callable
        Those that there are now.
    """

    def __init__(
        self,
        manager: HookManager,
        timeline: Timeline,
        reporter: StatusReporter,
        ledgers: Callable[[], Sequence[RegistrationLedger]],
    ) -> None:
        self._manager = manager
        self._timeline = timeline
        self._reporter = reporter
        self._ledgers = ledgers

    def reserved(self, pool: UnifiedKVPool) -> None:
        """The sink stands."""
        with self._noting_registrations():
            self._manager.hook.kvarena_pool_reserved(pool=pool)

    def resizing(self, pool: UnifiedKVPool, keep_bytes: int) -> None:
        """The memory behind `keep_bytes` goes."""
        with self._noting_registrations():
            self._manager.hook.kvarena_pool_resizing(pool=pool, keep_bytes=keep_bytes)

    def finalized(self, pool: UnifiedKVPool, resize: PostCaptureKVResize | None = None) -> None:
        """The pool has a size: the one that was asked for, or else what it has."""
        with self._noting_registrations():
            self._manager.hook.kvarena_pool_finalized(pool=pool, resize=resize or size_of(pool))

    def tell_size(self, resize: PostCaptureKVResize, transaction: Transaction) -> None:
        """Before the event, which the status is written after; what is taken back is untold."""
        before = self._reporter.resize
        self._reporter.resize = resize
        transaction.undo(lambda: setattr(self._reporter, "resize", before), "telling the old size")

    def again_reserved(self, pool: UnifiedKVPool) -> None:
        """The sink stands again."""
        raise_first(self._manager.call_every("kvarena_pool_reserved", pool=pool))

    def again_resizing(self, pool: UnifiedKVPool, keep_bytes: int) -> None:
        """The memory behind `keep_bytes` goes again."""
        raise_first(self._manager.call_every("kvarena_pool_resizing", pool=pool, keep_bytes=keep_bytes))

    def again_finalized(self, pool: UnifiedKVPool) -> None:
        """The pool has its old size again."""
        raise_first(self._manager.call_every("kvarena_pool_finalized", pool=pool, resize=size_of(pool)))

    @contextmanager
    def _noting_registrations(self) -> Iterator[None]:
        """One event for each engine whose registrations the block has changed."""
        before = [ledger.epoch for ledger in self._ledgers()]
        began = time.perf_counter()
        yield
        for ledger, epoch in zip(self._ledgers(), before, strict=True):
            if ledger.epoch == epoch:
                continue
            regions = ledger.regions
            self._timeline.add(
                "registered",
                nbytes=ledger.registered_bytes,
                address=regions[0].address if regions else None,
                # Of all engines together: they are moved one after the other.
                milliseconds=(time.perf_counter() - began) * 1e3,
                engine=ledger.engine.name,
                regions=len(regions),
                epoch=ledger.epoch,
            )


def size_of(pool: UnifiedKVPool) -> PostCaptureKVResize:
    """A pool's size as it is now."""
    from kvarena.pool import resize_for

    return resize_for(pool, pool.total_bytes)
