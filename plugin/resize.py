"""The finalize of a pool: one transaction in steps (size, back, allocators, publish) over all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, final

from kvarena.errors import KvArenaError
from kvarena.plugin.ranks import Alone, RankReport, Ranks, agreed_tokens, raise_if_failed
from kvarena.pool.errors import OutOfMemoryError, PoolStateError
from kvarena.pool.transaction import Transaction

if TYPE_CHECKING:
    from kvarena.plugin.announcements import Announcements
    from kvarena.pool import PostCaptureKVResize, ResizableAllocator, ResizablePool

__all__ = ["PoolResize", "Sizer", "smaller_budget"]

logger = logging.getLogger("kvarena")


class Sizer(Protocol):
    """How an engine turns bytes, or tokens, into the configuration that its pool and allocators take.

    A configuration has at least `max_total_num_tokens` and `unified_memory_pool_bytes`.
    """

    def for_budget(self, nbytes: int) -> Any:
        """The largest configuration that `nbytes` bytes pay for; raises when not one request fits."""
        ...

    def for_tokens(self, tokens: int) -> Any:
        """The configuration of exactly so many tokens, no more than `for_budget` gave."""
        ...


@final
class PoolResize:
    """The transaction: enter it, take its steps in the order of the methods below, leave it.

    Left by an exception, it takes every step back, last first, and tells the other ranks, which do the
    same. Ranks meet from `size` on; one that fails before just ends.

    Parameters
    ----------
    pool : ResizablePool
        What is resized.
    announce : Announcements
        Tells the plugins, the registrations among them.
    allowed : callable
        Measures, at the moment of the call and with only the sink backed, how many bytes the pool may have:
        what must stay free is subtracted already.
    ranks : Ranks, optional
        Who must agree; by default there is only this process.
    retries : int
        How often to try again with less when memory runs out.
    keep_free : callable, optional
        Bytes that must be free beside the pool once it is backed.
    """

    def __init__(
        self,
        pool: ResizablePool,
        announce: Announcements,
        *,
        allowed: Callable[[], int],
        ranks: Ranks | None = None,
        retries: int = 0,
        keep_free: Callable[[], int] = int,
    ) -> None:
        self.pool = pool
        self.ranks = Alone() if ranks is None else ranks
        self.config: Any = None
        """The size, as the engine's own configuration; what stands in the end."""
        self.attempts = 0
        self.backing_ms = 0.0
        self._announce = announce
        self._allowed = allowed
        self._retries = retries
        self._keep_free = keep_free
        self._sizer: Sizer | None = None
        self._budget = 0
        self._shortage = ""
        self._transaction = Transaction()
        self._all_know = False

    def __enter__(self) -> PoolResize:
        self._transaction.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transaction.__exit__(kind, error, trace)
        if error is None:
            return
        for note in getattr(error, "__notes__", ()):
            logger.error("kvarena: %s", note)
        if self._sizer is not None and not self._all_know and self.ranks.count > 1:
            # The others are, or will be, in an exchange: they must not wait for a rank that has given up.
            # Before the first one they may be in a collective of the engine's own, which an exchange cannot
            # meet: all would wait for the group's timeout, where this rank's end tells them at once.
            try:
                self._exchange(RankReport("failed", failure=str(error) or repr(error)))
            except KvArenaError as unheard:
                logger.warning("kvarena: the other ranks were not told of the failure: %s", unheard)

    def undo(self, step: Callable[[], object], what: str) -> None:
        """Remember how to take back what was just done; `what` names it where that fails."""
        self._transaction.undo(step, what)

    def size(self, sizer: Sizer, budget: int) -> Any:
        """A configuration for this budget, with the tokens that every rank can hold.

        Raises
        ------
        RanksDisagreeError
            A rank cannot size its pool.
        """
        self._sizer, self._budget = sizer, budget
        self.config = self._sized(sizer)
        return self.config

    def back(self, config: Any = None) -> Any:
        """Back the configuration's bytes; where a rank runs out of memory, all try again with less.

        Parameters
        ----------
        config : object, optional
            By default what `size` gave; where that step was left out, there is no second attempt.

        Returns
        -------
        object
            The configuration that is backed.

        Raises
        ------
        RanksDisagreeError
            Not even the smallest attempt succeeded, or a rank failed otherwise; all hold their sink again.
        """
        if config is not None:
            self.config = config
        self.pool.check_finalize(self.config)  # before anyone lets go of anything
        # Last to be undone: when the sink is back, everyone hears of it and registers it.
        self.undo(lambda: self._announce.again_reserved(self.pool), "announcing the sink")
        self._announce.resizing(self.pool, 0)
        # From here on, even if no other rank can be heard any more.
        self.undo(self._revert, "backing the sink alone again")
        while True:
            mine, error = self._try_to_back()
            reports = self._exchange(mine)
            if not any(report.failure or report.stage != mine.stage for report in reports):
                return self.config
            # Decided by what all have said, the same everywhere: settings may differ between hosts.
            if not all(report.retry for report in reports):
                self._all_know = True  # all ranks end here; none will be in another exchange
                if error is not None and self.ranks.count == 1:
                    raise error
                raise_if_failed(reports, mine.stage)
            self._revert()
            self.attempts += 1
            self._budget = self._smaller(error)
            self._shortage = mine.failure
            logger.warning(
                "kvarena: backing %d bytes failed on %s; all ranks try again, this one offers %d bytes.",
                int(self.config.unified_memory_pool_bytes),
                ", ".join(
                    f"rank {rank}: {report.failure.rstrip('.')}"
                    for rank, report in enumerate(reports)
                    if report.failure
                ),
                self._budget,
            )
            assert self._sizer is not None
            self.config = self._sized(self._sizer)

    def resize(self, allocator: ResizableAllocator) -> None:
        """Give an allocator the size that is backed."""
        allocator.resize(self.config)
        self.undo(allocator.revert_resize, "giving the allocators their old size")

    def publish(self, resize: PostCaptureKVResize) -> None:
        """Tell every plugin, the registrations among them, what the pool has become."""
        # Undone before the memory goes: nothing may stay registered over it.
        self.undo(lambda: self._announce.again_resizing(self.pool, 0), "letting go of the new memory")
        self._announce.finalized(self.pool, resize)

    def finish(self) -> int:
        """Make sure that all ranks got here; returns how many there are.

        Raises
        ------
        RanksDisagreeError
            One did not, so this one goes back, too.
        """
        if not self.pool.finalized:
            raise PoolStateError("The engine did not finalize its pool.")
        reports = self._exchange(
            RankReport("resized", tokens=self.config.max_total_num_tokens, nbytes=self.pool.total_bytes)
        )
        self._all_know = True
        raise_if_failed(reports, "resized")
        return len(reports)

    def _exchange(self, mine: RankReport) -> list[RankReport]:
        try:
            return list(self.ranks.exchange(mine))
        except KvArenaError:
            self._all_know = True  # who cannot be reached now is not waited for once more
            raise

    def _sized(self, sizer: Sizer) -> Any:
        failure, tokens = "", 0
        own: KvArenaError | None = None
        config: Any = None
        try:
            config = sizer.for_budget(self._budget)
            tokens = int(config.max_total_num_tokens)
        except KvArenaError as error:
            failure, own = str(error), error
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
            # Its own words go to every rank; SGLang raises RuntimeError when nothing fits.
            failure = f"{type(error).__name__}: {error}"
        if tokens <= 0 and not failure:
            failure = f"no token fits a budget of {self._budget} bytes"
        if failure and self._shortage:
            failure = f"{self._shortage} Then: {failure}"
        reports = self._exchange(RankReport("sized", failure=failure, tokens=tokens))
        if any(report.failure or report.stage != "sized" for report in reports):
            self._all_know = True
            if own is not None and self.ranks.count == 1:
                raise own
        agreed = agreed_tokens(reports, "sized")
        # The same tokens give the same bytes on ranks of one layout; a budget's leftovers would not.
        return config if len(reports) == 1 else sizer.for_tokens(agreed)

    def _try_to_back(self) -> tuple[RankReport, KvArenaError | None]:
        retry = self._sizer is not None and self.attempts < self._retries
        began = time.perf_counter()
        try:
            self.pool.finalize_backing(self.config)
            self._require_left()
        except OutOfMemoryError as error:
            return RankReport("backed", failure=str(error), retry=retry), error
        except KvArenaError as error:
            return RankReport("backed", failure=str(error)), error
        self.backing_ms = (time.perf_counter() - began) * 1e3
        return RankReport("backed", retry=retry, nbytes=self.pool.total_bytes), None

    def _require_left(self) -> None:
        """What was free when the size was decided may be somebody else's by now."""
        keep, free = self._keep_free(), self.pool.driver.free_bytes()
        if free < keep:
            nbytes = self.pool.total_bytes
            raise OutOfMemoryError(
                "back",
                "HEADROOM",
                requested=nbytes,
                free=max(0, nbytes - (keep - free)),
                fix=f"{keep} bytes must stay free, and {free} are: free memory on the device, or lower "
                "KVARENA_HEADROOM.",
            )

    def _smaller(self, error: KvArenaError | None) -> int:
        # Ranks that had enough offer the same again; the minimum over tokens brings them down.
        less = self._budget
        if isinstance(error, OutOfMemoryError):
            less = smaller_budget(self.pool.driver.granularity, self._budget, error, self.attempts)
        return max(0, min(less, self._allowed()))

    def _revert(self) -> None:
        if self.pool.finalized:
            self.pool.revert_finalize()


def smaller_budget(granularity: int, last: int, error: OutOfMemoryError, attempt: int) -> int:
    """How many bytes to try after `last` was refused for the `attempt`-th time.

    What was lacking is taken away, at least 1/128, and twice as much each time: a device may refuse less
    than it says is free.
    """
    lacking = max(0, error.requested - error.free) + granularity
    return last - (max(lacking, last >> 7) << (attempt - 1))
