"""Who hears of a pool's size, and of its undoing: plugins (the ledgers too), the timeline and the status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, final

from kvarena.plugin.closing import raise_first

if TYPE_CHECKING:
    from kvarena.hooks import HookManager
    from kvarena.plugin.observe.status.reporter import StatusReporter
    from kvarena.plugin.observe.timeline import Timeline
    from kvarena.pool import PostCaptureKVResize, ResizablePool, UnifiedKVPool, UnifiedPool
    from kvarena.transfer import RegistrationLedger

__all__ = ["Announcements", "Observer", "size_of"]


class Observer(Protocol):
    """Who watches a life; `kvarena.plugin.observe.observation.Observation` is one."""

    timeline: Timeline
    """Gets the events."""
    reporter: StatusReporter
    """Shows the pool and its size."""

    def begin(self, pool: UnifiedPool, ledgers: Callable[[], Sequence[RegistrationLedger]]) -> None:
        """A pool is reserved."""
        ...

    def close(self) -> None:
        """The pool is closed."""
        ...


@final
class Announcements:
    """Of one pool's life. What raises here was refused by a plugin; `again_*` ask every plugin all the same.

    Parameters
    ----------
    manager : HookManager
        Of the plugins.
    observer : Observer or None
        Gets an event for each engine whose registrations have changed, and the size.
    ledgers : callable
        Those that there are now.
    details : callable, optional
        What else the event of a ledger's registrations says.
    """

    def __init__(
        self,
        manager: HookManager,
        observer: Observer | None,
        ledgers: Callable[[], Sequence[RegistrationLedger]],
        details: Callable[[RegistrationLedger], Mapping[str, Any]] = lambda ledger: {"epoch": ledger.epoch},
    ) -> None:
        self.observer = observer
        self._manager = manager
        self._ledgers = ledgers
        self._details = details

    def reserved(self, pool: ResizablePool) -> None:
        """The sink stands."""
        with self.noting_registrations():
            self._manager.hook.kvarena_pool_reserved(pool=pool)

    def resizing(self, pool: ResizablePool, keep_bytes: int) -> None:
        """The memory behind `keep_bytes` goes."""
        # Where all of it is replaced, what is registered in its place is the event.
        with self.noting_registrations() if keep_bytes else nullcontext():
            self._manager.hook.kvarena_pool_resizing(pool=pool, keep_bytes=keep_bytes)

    def finalized(self, pool: ResizablePool, resize: PostCaptureKVResize) -> None:
        """The pool has this size."""
        with self.noting_registrations():
            self._manager.hook.kvarena_pool_finalized(pool=pool, resize=resize)

    def tell_size(
        self, resize: PostCaptureKVResize, undo: Callable[[Callable[[], object], str], None]
    ) -> None:
        """Before the event, which the status is written after; `undo` takes it back."""
        if self.observer is None:
            return
        reporter = self.observer.reporter
        before, reporter.resize = reporter.resize, resize
        undo(lambda: setattr(reporter, "resize", before), "telling the old size")

    def again_reserved(self, pool: ResizablePool) -> None:
        """The sink stands again."""
        raise_first(self._manager.call_every("kvarena_pool_reserved", pool=pool))

    def again_resizing(self, pool: ResizablePool, keep_bytes: int) -> None:
        """The memory behind `keep_bytes` goes again."""
        raise_first(self._manager.call_every("kvarena_pool_resizing", pool=pool, keep_bytes=keep_bytes))

    def again_finalized(self, pool: ResizablePool, resize: PostCaptureKVResize) -> None:
        """The pool has its old size again."""
        raise_first(self._manager.call_every("kvarena_pool_finalized", pool=pool, resize=resize))

    @contextmanager
    def noting_registrations(self) -> Iterator[None]:
        """One event for each engine whose registrations the block has changed."""
        before = {id(ledger): ledger.epoch for ledger in self._ledgers()}
        began = time.perf_counter()
        yield
        milliseconds = (time.perf_counter() - began) * 1e3
        for ledger in self._ledgers():
            if ledger.epoch != before.get(id(ledger), 0):
                # Of all engines together: they are moved one after the other.
                self.note("registered", ledger, milliseconds)

    def note(self, event: str, ledger: RegistrationLedger, milliseconds: float) -> None:
        """An event of one engine's registrations, as they are now."""
        if self.observer is not None:
            regions = ledger.regions
            self.observer.timeline.add(
                event,
                nbytes=ledger.registered_bytes,
                address=regions[0].address if regions else None,
                milliseconds=milliseconds,
                engine=ledger.engine.name,
                regions=len(regions),
                **self._details(ledger),
            )


def size_of(pool: UnifiedKVPool) -> PostCaptureKVResize:
    """A pool's size as it is now."""
    from kvarena.pool import resize_for

    return resize_for(pool, pool.total_bytes)
