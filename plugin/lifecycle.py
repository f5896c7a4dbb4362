"""A pool's life from plan to close, with every decision made through the hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, final

from kvarena.errors import KvArenaError
from kvarena.hooks import BudgetRequest, HookManager
from kvarena.plugin.announcements import Announcements, Observer, size_of
from kvarena.plugin.closing import close_pool, failures_of, raise_first
from kvarena.plugin.composition import collect_refusals, make_engines, make_manager, make_observer
from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.resize import PoolResize
from kvarena.pool.transaction import Transaction

if TYPE_CHECKING:
    import torch
    from kvarena.hooks.ledgers import LedgerKeeper
    from kvarena.plugin.observe.status.reporter import StatusReporter
    from kvarena.plugin.observe.timeline import Timeline
    from kvarena.plugin.ranks import Ranks
    from kvarena.pool import (
        Driver,
        ElasticAllocator,
        PostCaptureKVResize,
        Refusal,
        ResizableAllocator,
        SizingRequest,
        SubPoolSpec,
        UnifiedKVPool,
    )
    from kvarena.transfer import RegistrationLedger

__all__ = ["PoolLifecycle"]

logger = logging.getLogger("kvarena")

_UNBLOCK = "Take kvarena's own plugins out of KVARENA_BLOCK_PLUGINS."


@final
class PoolLifecycle:
    """Leads one pool through reserve, capture, finalize, growth and close.

    Parameters
    ----------
    settings : Settings
        What the operator set.
    manager : HookManager, optional
        By default one with the built-in answers and the installed plugins.
    device : torch.device or str
        Where the pool lies.
    ranks : Ranks, optional
        The processes that must end with one size; by default there is only this one.
    observer : Observer, optional
        Who watches; by default a timeline, the status file and the metrics, as `settings` ask for.
    name : str
        What ``kvarena status`` calls this process, such as ``"decode"``; by default the program's name.

    Raises
    ------
    MetricsPortError
        ``metrics_port`` is taken.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        device: torch.device | str,
        manager: HookManager | None = None,
        ranks: Ranks | None = None,
        observer: Observer | None = None,
        name: str = "",
    ) -> None:
        import torch

        self.settings = settings
        self.device = torch.device(device)
        self.manager = make_manager(settings) if manager is None else manager
        self.observer = make_observer(settings, name) if observer is None else observer
        self.pool: UnifiedKVPool | None = None
        self._ranks = ranks
        self._driver: Driver | None = None
        self._keeper: LedgerKeeper | None = None
        self._announce = Announcements(self.manager, self.observer, lambda: self.ledgers)

    @property
    def timeline(self) -> Timeline:
        """The observer's."""
        return self.observer.timeline

    @property
    def reporter(self) -> StatusReporter:
        """The observer's."""
        return self.observer.reporter

    @property
    def driver(self) -> Driver:
        """The driver that the hooks chose for the device."""
        if self._driver is None:
            self._driver = self.manager.hook.kvarena_driver(device=self.device)
        if self._driver is None:
            raise ConfigError(
                f"no driver for device {self.device}.",
                fix="Use cuda or cpu, or install a plugin that answers kvarena_driver.",
            )
        return self._driver

    @property
    def ledgers(self) -> Sequence[RegistrationLedger]:
        """One ledger for each transfer engine, as they stand."""
        return () if self._keeper is None else self._keeper.ledgers

    def plan(self, request: SizingRequest) -> tuple[Refusal, ...]:
        """Ask every plugin why this configuration should not be sized after capture; empty: go on."""
        refusals = collect_refusals(self.manager, request)
        for refusal in refusals:
            self.timeline.add(
                "refused",
                level=logging.WARNING,
                code=refusal.code,
                setting=refusal.setting,
                reason=refusal.reason,
            )
        return refusals

    def reserve(
        self,
        specs: Sequence[SubPoolSpec],
        *,
        total_bytes: int,
        page_size: int,
        bs1_floor_terms: Iterable[tuple[str, int]] = (),
        post_capture: bool = True,
    ) -> UnifiedKVPool:
        """Reserve the largest pool that could fit and back its sink only.

        Parameters
        ----------
        specs : sequence of SubPoolSpec
            One grow-up end, one grow-down end, any floats.
        total_bytes : int
            The upper bound.
        page_size : int
            Tokens a page.
        bs1_floor_terms : iterable of (str, int)
            Tokens of each sub-pool that one request needs at least.
        post_capture : bool
            False: an eager pool of `total_bytes`, what a refused configuration gets.
        """
        from kvarena.hooks.ledgers import LedgerKeeper
        from kvarena.pool import UnifiedKVPool

        if self.pool is not None:
            raise KvArenaError("this lifecycle has a pool already.", fix="Make one lifecycle for each pool.")
        with ExitStack() as undo:
            with self.timeline.timed("reserved" if post_capture else "eager") as event:
                pool = UnifiedKVPool(
                    total_bytes=total_bytes,
                    sub_pool_specs=specs,
                    driver=self.driver,
                    page_size=page_size,
                    post_capture_active=post_capture,
                    bs1_floor_terms=list(bs1_floor_terms),
                )
                event.update(nbytes=pool.arena.reserved_bytes, address=pool.arena.base)
            undo.callback(pool.close)
            self.timeline.add(
                "sink" if post_capture else "backed", nbytes=pool.arena.backed_bytes, address=pool.arena.base
            )
            engines = make_engines(self.manager, self.settings, pool.arena)
            for engine in engines:
                undo.callback(engine.close)
            self._keeper = LedgerKeeper(self.manager, pool)
            undo.callback(self._drop_keeper)
            for engine in engines:
                self._keeper.add(engine, register=False)
            if not self._keeper.attach():
                raise ConfigError("nothing would keep the registrations in step with the pool.", fix=_UNBLOCK)
            self._announce.reserved(pool)
            undo.pop_all()
        self.pool = pool
        self.observer.begin(pool, lambda: self.ledgers)
        return pool

    def budget(self) -> int:
        """Measure, now that graphs are captured, how many bytes the pool may have, sink included."""
        self._pool()
        with self.timeline.timed("budget") as event:
            released = getattr(self.driver, "cached_bytes_released", 0)
            # What torch caches is released first: no driver call can see it.
            free = self.driver.free_bytes()
            nbytes = self._allowed_bytes()
            event.update(
                nbytes=nbytes,
                free=free,
                minus_headroom=self.settings.headroom,
                at_most=self.settings.pool_bytes,
                torch_cache_released=getattr(self.driver, "cached_bytes_released", 0) - released,
            )
        return nbytes

    def finalize(self, resize: PostCaptureKVResize, allocator: ResizableAllocator) -> PostCaptureKVResize:
        """Back the final size in place, resize the allocators, re-register: all of it or nothing.

        The size is never above ``pool_bytes``, nor, with a headroom, above what is left beside it. When
        backing runs out of memory it is tried again with less, as often as ``finalize_retries`` says; each
        time memory is measured anew. With several ranks all get the tokens of the one that has the least.

        Returns
        -------
        PostCaptureKVResize
            The size that stands; smaller than asked for after a retry.

        Raises
        ------
        KvArenaError
            The pool, its allocators and its registrations are as they were.
        """
        pool = self._pool()
        pool.check_finalize(resize)
        asked = pool.check_total_bytes(resize.unified_memory_pool_bytes)
        with PoolResize(
            pool,
            self._announce,
            allowed=self._allowed_bytes,
            ranks=self._ranks,
            retries=self.settings.finalize_retries,
            keep_free=lambda: self.settings.headroom,
        ) as steps:
            steps.size(_PoolSizer(pool, resize), min(asked, self._max_bytes(asked)))
            with self.timeline.timed("finalized") as event:
                steps.back()
                steps.resize(allocator)
                self._announce.tell_size(steps.config, steps.undo)
                event.update(nbytes=pool.total_bytes, address=pool.arena.base)
            steps.publish(steps.config)
            steps.finish()
        self.reporter.watch(allocator)
        final: PostCaptureKVResize = steps.config
        return final

    def grow(self, total_bytes: int, allocator: ElasticAllocator) -> None:
        """Back and register more, up to `total_bytes`, while requests are served.

        Raises
        ------
        KvArenaError
            A failed call changes nothing.
        """
        pool = self._pool()
        before = pool.total_bytes
        with Transaction() as transaction:
            with self.timeline.timed("grown") as event:
                pool.grow(total_bytes)
                # Last to be undone: everyone hears which size stands.
                transaction.undo(
                    lambda: self._announce.again_finalized(pool, size_of(pool)), "announcing the old size"
                )
                transaction.undo(lambda: pool.shrink(before), "giving the new memory back")
                # Before anyone hears of the size, so that a hook reads the bounds that hold from now on. No
                # page is given out meanwhile: that is the caller's own thread.
                allocator.grow()
                transaction.undo(lambda: allocator.shrink(before), "giving the allocators their old size")
                self._announce.tell_size(size_of(pool), transaction.undo)
                event.update(nbytes=pool.total_bytes, address=pool.arena.base)
            transaction.undo(
                lambda: self._announce.again_resizing(pool, before), "letting go of the new memory"
            )
            self._announce.finalized(pool, size_of(pool))

    def shrink(self, total_bytes: int, allocator: ElasticAllocator) -> None:
        """Move live pages out of the tail, unregister it, then let its memory go.

        Raises
        ------
        KvArenaError
            Pages in the tail are in flight, or the rest has no room for them, or a plugin failed;
            a failed call changes nothing.
        """
        pool = self._pool()
        total_bytes = pool.check_shrink(total_bytes)  # before anyone lets go of anything
        with Transaction() as transaction:
            allocator.shrink(total_bytes)
            transaction.undo(allocator.grow, "giving the allocators their old size")
            transaction.undo(
                lambda: self._announce.again_finalized(pool, size_of(pool)), "registering the tail again"
            )
            self._announce.resizing(pool, total_bytes)
            with self.timeline.timed("shrunk") as event:
                pool.shrink(total_bytes)
                transaction.undo(pool.revert_shrink, "taking the memory again")
                self._announce.tell_size(size_of(pool), transaction.undo)
                event.update(nbytes=pool.total_bytes, address=pool.arena.base)
            self._announce.finalized(pool, size_of(pool))

    def close(self) -> None:
        """Tell everyone, let go of every region, then of the memory; a second call does nothing.

        Raises
        ------
        KvArenaError
            A plugin, an engine or the driver failed. What could not be let go, the memory among it
            while a ledger has regions, is tried again by the next call.
        """
        from kvarena.pool import ArenaState

        pool = self.pool
        if pool is None:
            self.observer.close()
            return

        def close_engines() -> list[KvArenaError]:
            failures: list[KvArenaError] = []
            for ledger in self.ledgers:
                failures += failures_of(ledger.engine.close, f"transfer engine {ledger.engine.name!r}")
            self._drop_keeper()
            return failures

        failures = close_pool(self.manager, pool, lambda: self.ledgers, pool.close, let_go=close_engines)
        if pool.arena.state is ArenaState.CLOSED:
            self.pool = None
            self.timeline.add("closed")
            self.observer.close()
        raise_first(failures)

    def _allowed_bytes(self) -> int:
        """Measured now: what the pool may have, sink included, so that the headroom stays free."""
        pool = self._pool()
        request = BudgetRequest(
            pool, self.driver, headroom_bytes=self.settings.headroom, max_bytes=self.settings.pool_bytes
        )
        nbytes: int | None = self.manager.hook.kvarena_budget(request=request)
        if nbytes is None:
            raise ConfigError("no plugin says how large the pool may be.", fix=_UNBLOCK)
        return min(nbytes, self._max_bytes(nbytes))

    def _max_bytes(self, otherwise: int) -> int:
        """What the operator allows; memory comes in whole granules."""
        maximum, granularity = self.settings.pool_bytes, self.driver.granularity
        return otherwise if maximum is None else maximum // granularity * granularity

    def _drop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.detach()
        self._keeper = None

    def _pool(self) -> UnifiedKVPool:
        if self.pool is None:
            raise KvArenaError("there is no pool.", fix="Call reserve first.")
        return self.pool


@final
class _PoolSizer:
    """kvarena's own pool: a size that was asked for, or less of it."""

    def __init__(self, pool: UnifiedKVPool, asked: PostCaptureKVResize) -> None:
        self._pool = pool
        self._asked = asked

    def for_budget(self, nbytes: int) -> PostCaptureKVResize:
        """The size that was asked for, if it fits, else what fits."""
        from kvarena.pool import smaller_resize

        if nbytes == self._asked.unified_memory_pool_bytes:
            return self._asked
        return smaller_resize(self._pool, self._asked, nbytes)

    def for_tokens(self, tokens: int) -> PostCaptureKVResize:
        """The fewest bytes for so many tokens; one layout gives the same on every rank."""
        from kvarena.pool import resize_for_tokens, smaller_resize

        nbytes = resize_for_tokens(self._pool, tokens).unified_memory_pool_bytes
        return smaller_resize(self._pool, self._asked, nbytes)
