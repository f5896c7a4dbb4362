"""One resize after capture: sized, backed, resized and registered on every rank, or undone on every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from kvarena.errors import KvArenaError
from kvarena.hooks import BudgetRequest
from kvarena.plugin.engines.sglang.bound import SglangPool
from kvarena.plugin.engines.sglang.families.targets import Family
from kvarena.plugin.engines.sglang.ranks import Ranks, Report, raise_if_failed
from kvarena.plugin.engines.sglang.report import announce_finalized
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.pool import OutOfMemoryError, PostCaptureKVResize
from kvarena.pool.errors import PoolStateError

if TYPE_CHECKING:
    from kvarena.plugin.engines.sglang.measure.sizing import PoolSizing

__all__ = ["ResizeSession"]

logger = logging.getLogger("kvarena.sglang")

_RUNNER_FIELDS = (
    "max_total_num_tokens",
    "full_max_total_num_tokens",
    "swa_max_total_num_tokens",
    "max_running_requests",
)


@final
class ResizeSession:
    """The transaction of one resize.

    Left by an exception, it takes every step back, last first, and tells the other ranks, which do the same.
    Ranks meet from `solve` on; one that fails before just ends, as in stock.

    Parameters
    ----------
    bound : BoundPool
        What is resized.
    family : Family
        The release's.
    ranks : Ranks
        Who must agree.
    runner : ModelRunner, optional
        Whose figures SGLang sets; put back when the resize fails.
    """

    def __init__(self, bound: SglangPool, family: Family, *, ranks: Ranks, runner: Any = None) -> None:
        self.bound = bound
        self.attempts = 0
        self.backing_ms = 0.0
        self.sizing: PoolSizing | None = None
        """What was measured; None: SGLang's own budget counts."""
        self._family = family
        self.ranks = ranks
        self._runner = runner
        self._solver: Callable[[int], Any] | None = None
        self._from_tokens: Callable[[int], Any] | None = None
        self._budget = 0
        self._lack = ""
        self._config: Any = None
        self._undo: list[Callable[[], object]] = []
        self._told = False
        if runner is not None:
            self._remember_runner()

    def __enter__(self) -> ResizeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        for step in reversed(self._undo):
            try:
                step()
            except Exception:
                logger.exception("kvarena: undoing the resize failed in part.")
        self._undo.clear()
        if self._solver is not None and not self._told and self.ranks.count > 1:
            # The others are, or will be, in an exchange: they must not wait for a rank that has given up.
            # Before the first one they may be in SGLang's own reduction of free memory, which an exchange
            # cannot meet: all would wait for the group's timeout, where this rank's end tells them at once.
            try:
                self._exchange(Report("failed", failure=str(error) or repr(error)))
            except KvArenaError as unheard:
                logger.warning("kvarena: the other ranks were not told of the failure: %s", unheard)

    def undo(self, step: Callable[[], object]) -> None:
        """Remember how to take back what was just done."""
        self._undo.append(step)

    def solve(self, solver: Callable[[int], Any], from_tokens: Callable[[int], Any], budget: int) -> Any:
        """A configuration for this budget, with the tokens that every rank can hold.

        Parameters
        ----------
        solver : callable
            A budget in bytes to SGLang's configuration.
        from_tokens : callable
            A count of tokens to SGLang's configuration.
        budget : int
            Bytes, as SGLang measured them on this rank.

        Raises
        ------
        RanksDisagreeError
            A rank cannot size its pool.
        """
        self._solver, self._from_tokens = solver, from_tokens
        self._budget = self._allowed(budget)
        if self._budget < budget:
            # What fails for that reason blames SGLang's own flags.
            logger.info(
                "kvarena: SGLang measured %d bytes for the pool, of which it may have %d (what is free and "
                "reserved, KVARENA_POOL_BYTES, KVARENA_HEADROOM, plugins).",
                budget,
                self._budget,
            )
        self._config = self._solve()
        return self._config

    def back(self, config: Any) -> None:
        """Back the configuration's bytes; where a rank runs out of memory, all try again with less.

        `config` is changed in place when less was backed, because SGLang goes on with it.

        Raises
        ------
        RanksDisagreeError
            Not even the smallest attempt succeeded, or a rank failed otherwise; all hold their sink again.
        """
        if self.bound.finalized or self.bound.closed:
            state = "closed" if self.bound.closed else "finalized already"
            raise PoolStateError(f"This pool is {state}.")
        # Run last: whatever was registered before, the sink, is registered again once it is back.
        self.undo(lambda: self._tell_every("kvarena_pool_reserved"))
        runtime.manager.hook.kvarena_pool_resizing(pool=self.bound, keep_bytes=0)
        # From here on, even if no other rank can be heard any more.
        self.undo(self.bound.revert)
        while True:
            mine, error = self._try_to_back(config)
            reports = self._exchange(mine)
            if not any(report.failure or report.stage != mine.stage for report in reports):
                break
            # Decided by what all have said, the same everywhere: settings may differ between hosts.
            if not all(report.retry for report in reports):
                self._told = True  # all ranks end here; none will be in another exchange
                if error is not None and self.ranks.count == 1:
                    raise error
                raise_if_failed(reports, mine.stage)
            self.bound.revert()
            self.attempts += 1
            self._budget = max(0, min(self._budget - self._less(error), self._beside_the_reserve()))
            self._lack = mine.failure
            logger.warning(
                "kvarena: backing %d bytes failed on %s; all ranks try again, this one offers %d bytes.",
                int(config.unified_memory_pool_bytes),
                ", ".join(
                    f"rank {rank}: {report.failure.rstrip('.')}"
                    for rank, report in enumerate(reports)
                    if report.failure
                ),
                self._budget,
            )
            _copy_config(self._solve(), config)
        self.bound.take_size(int(config.unified_memory_pool_bytes))
        self._config = config

    def publish(self) -> PostCaptureKVResize:
        """Tell every hook, the registrations among them, what the pool has become."""
        config = self._config
        resize = PostCaptureKVResize(
            max_total_num_tokens=getattr(config, "max_total_num_tokens", 0),
            full_max_total_num_tokens=getattr(config, "full_max_total_num_tokens", None),
            swa_max_total_num_tokens=getattr(config, "swa_max_total_num_tokens", None),
            unified_memory_pool_bytes=self.bound.total_bytes,
        )
        # Before the memory of a region goes.
        self.undo(lambda: self._tell_every("kvarena_pool_resizing", keep_bytes=0))
        runtime.manager.hook.kvarena_pool_finalized(pool=self.bound, resize=resize)
        return resize

    def finish(self) -> None:
        """Mirror the bytes into SGLang's figures, tell everyone, and make sure that all ranks got here.

        Raises
        ------
        KvArenaError
            A hook or a registration failed, here or on another rank.
        """
        if not self.bound.finalized:
            raise PoolStateError("SGLang did not finalize its pool.")
        config, runner = self._config, self._runner
        kept = getattr(runner, "memory_pool_config", None)
        if kept is not None:
            kept.unified_memory_pool_bytes = self.bound.total_bytes
        resize = self.publish()
        reports = self._exchange(
            Report("resized", tokens=config.max_total_num_tokens, nbytes=self.bound.total_bytes)
        )
        self._told = True
        raise_if_failed(reports, "resized")
        try:
            announce_finalized(
                self.bound, resize, milliseconds=self.backing_ms, attempts=self.attempts, ranks=len(reports)
            )
        except Exception:
            # Every rank has the new size by now: one alone must not go back for the sake of a line in a log.
            logger.exception("kvarena: the pool is resized, but this cannot be reported.")

    def _exchange(self, mine: Report) -> list[Report]:
        try:
            return self.ranks.exchange(mine)
        except KvArenaError:
            self._told = True  # who cannot be reached now is not waited for once more
            raise

    def _tell_every(self, hook: str, **kwargs: Any) -> None:
        """Every plugin hears, whatever became of the one before it."""
        for failure in runtime.manager.call_every(hook, pool=self.bound, **kwargs):
            logger.error("kvarena: %s", failure)

    def _allowed(self, budget: int) -> int:
        """SGLang's budget, or less if a hook or the operator says so."""
        settings = runtime.settings
        maximum = (
            budget if settings is None or settings.pool_bytes is None else min(budget, settings.pool_bytes)
        )
        request = BudgetRequest(
            self.bound,  # type: ignore[arg-type]
            self.bound.driver,
            headroom_bytes=0 if settings is None else settings.headroom,
            max_bytes=maximum,
        )
        answer = runtime.manager.hook.kvarena_budget(request=request)
        return maximum if answer is None else min(maximum, int(answer))

    def _solve(self) -> Any:
        assert self._solver is not None
        failure, tokens = "", 0
        config: Any = None
        try:
            config = self._solver(self._budget)
            tokens = int(config.max_total_num_tokens)
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
            # Its own words go to every rank; SGLang raises RuntimeError when nothing fits.
            failure = f"{type(error).__name__}: {error}"
        if tokens <= 0 and not failure:
            failure = f"no token fits a budget of {self._budget} bytes"
        if failure and self._lack:
            failure = f"{self._lack} Then: {failure}"
        reports = self._exchange(Report("sized", failure=failure, tokens=tokens))
        if any(report.failure or report.stage != "sized" for report in reports):
            self._told = True
            raise_if_failed(reports, "sized")
        if len(reports) > 1:
            # The same tokens give the same bytes on ranks of one layout; a budget's leftovers would not.
            assert self._from_tokens is not None
            config = self._from_tokens(min(report.tokens for report in reports))
        config.unified_memory_pool_bytes = self._bytes_of(config)
        return config

    def _bytes_of(self, config: Any) -> int:
        """The pool's bytes: in the release's own field, or the sum over both sides' tokens."""
        for name in self._family.budget_fields:
            value = getattr(config, name, None)
            if value is not None:
                return min(int(value), self.bound.reserved_bytes)
        full, window = (int(self.bound.spec(name).entry_bytes()) for name in ("full", "swa"))
        tokens = int(config.full_max_total_num_tokens), int(config.swa_max_total_num_tokens)
        return min(tokens[0] * full + tokens[1] * window, self.bound.reserved_bytes)

    def _try_to_back(self, config: Any) -> tuple[Report, KvArenaError | None]:
        nbytes = getattr(config, "unified_memory_pool_bytes", None)
        retries = 0 if runtime.settings is None else runtime.settings.finalize_retries
        again = self._solver is not None and self.attempts < retries
        began = time.perf_counter()
        try:
            self.bound.back(nbytes)  # type: ignore[arg-type]
        except OutOfMemoryError as error:
            return Report("backed", failure=str(error), retry=again), error
        except KvArenaError as error:
            return Report("backed", failure=str(error)), error
        self.backing_ms = (time.perf_counter() - began) * 1e3
        return Report("backed", retry=again, nbytes=self.bound.backed_bytes), None

    def _beside_the_reserve(self) -> int:
        """What the pool may have by now, with only the sink backed, if the reserve is to stay free."""
        if self.sizing is None:
            return self._budget
        return self.bound.driver.free_bytes() + self.bound.backed_bytes - self.sizing.stays_free_bytes

    def _less(self, error: KvArenaError | None) -> int:
        """How many bytes to ask for less: what was lacking, at least 1/128, and twice as much each time.

        Ranks that had enough ask for the same again; the minimum over tokens brings them down.
        """
        if not isinstance(error, OutOfMemoryError):
            return 0
        lacking = max(0, error.requested - error.free) + self.bound.driver.granularity
        return max(lacking, self._budget >> 7) << (self.attempts - 1)

    def _remember_runner(self) -> None:
        for owner, names in (
            (self._runner, _RUNNER_FIELDS),
            (
                getattr(self._runner, "memory_pool_config", None),
                (*_RUNNER_FIELDS, "unified_memory_pool_bytes"),
            ),
        ):
            for name in names:
                if owner is not None and hasattr(owner, name):
                    before = getattr(owner, name)
                    self.undo(lambda owner=owner, name=name, before=before: setattr(owner, name, before))  # type: ignore[misc]


def _copy_config(source: Any, target: Any) -> None:
    for name, value in vars(source).items():
        setattr(target, name, value)
