"""One resize after capture, through SGLang's own functions: `PoolResize` in SGLang's order and terms."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from kvarena.hooks import BudgetRequest, HookManager
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.sglang.bound import SglangPool
from kvarena.plugin.engines.sglang.families.targets import Family
from kvarena.plugin.engines.sglang.report import announce_finalized
from kvarena.plugin.ranks import Ranks
from kvarena.plugin.resize import PoolResize
from kvarena.pool import PostCaptureKVResize

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
    """The transaction of one resize, and the figures of SGLang's that go with it.

    Parameters
    ----------
    bound : SglangPool
        What is resized.
    family : Family
        The release's.
    manager : HookManager
        Whose plugins may lower the budget.
    settings : Settings
        The operator's limits.
    ranks : Ranks, optional
        Who must agree; by default there is only this process.
    runner : ModelRunner, optional
        Whose figures SGLang sets; put back when the resize fails.
    """

    def __init__(
        self,
        bound: SglangPool,
        family: Family,
        *,
        manager: HookManager,
        settings: Settings,
        ranks: Ranks | None = None,
        runner: Any = None,
    ) -> None:
        self.bound = bound
        self.steps = PoolResize(
            bound,
            bound.announce,
            allowed=self._allowed_now,
            ranks=ranks,
            retries=settings.finalize_retries,
            keep_free=self._keep_free,
        )
        self._family = family
        self._manager = manager
        self._settings = settings
        self._runner = runner
        self.sizing: PoolSizing | None = None
        """What was measured; None: SGLang's own budget counts."""
        self._reserve = 0

    def __enter__(self) -> ResizeSession:
        self.steps.__enter__()
        for owner, names in (
            (self._runner, _RUNNER_FIELDS),
            (
                getattr(self._runner, "memory_pool_config", None),
                (*_RUNNER_FIELDS, "unified_memory_pool_bytes"),
            ),
        ):
            for name in names:
                if owner is not None and hasattr(owner, name):
                    self._remember(owner, name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.steps.__exit__(kind, error, trace)

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
        # What SGLang keeps free, its fraction above all; the sink's memory is the pool's already.
        self._reserve = max(0, self.bound.driver.free_bytes() + self.bound.backed_bytes - budget)
        allowed = self._within(budget)
        if allowed < budget:
            # What fails for that reason blames SGLang's own flags.
            logger.info(
                "kvarena: SGLang measured %d bytes for the pool, of which it may have %d (what is free and "
                "reserved, KVARENA_POOL_BYTES, KVARENA_HEADROOM, plugins).",
                budget,
                allowed,
            )
        return self.steps.size(_SglangSizer(self.bound, self._family, solver, from_tokens), allowed)

    def back(self, config: Any) -> None:
        """Back the configuration's bytes, or less; `config` is changed in place: SGLang goes on with it."""
        backed = self.steps.back(config)
        if backed is not config:
            for name, value in vars(backed).items():
                setattr(config, name, value)

    def publish(self) -> PostCaptureKVResize:
        """Tell every plugin, the registrations among them, what the pool has become."""
        config = self.steps.config
        resize = PostCaptureKVResize(
            max_total_num_tokens=getattr(config, "max_total_num_tokens", 0),
            full_max_total_num_tokens=getattr(config, "full_max_total_num_tokens", None),
            swa_max_total_num_tokens=getattr(config, "swa_max_total_num_tokens", None),
            unified_memory_pool_bytes=self.bound.total_bytes,
        )
        self.steps.publish(resize)
        return resize

    def finish(self) -> None:
        """Mirror the bytes into SGLang's figures, tell everyone, and make sure that all ranks got here.

        Raises
        ------
        KvArenaError
            A hook or a registration failed, here or on another rank.
        """
        kept = getattr(self._runner, "memory_pool_config", None)
        if kept is not None:
            kept.unified_memory_pool_bytes = self.bound.total_bytes
        resize = self.publish()
        ranks = self.steps.finish()
        try:
            announce_finalized(
                self.bound,
                resize,
                milliseconds=self.steps.backing_ms,
                attempts=self.steps.attempts,
                ranks=ranks,
            )
        except Exception:
            # Every rank has the new size by now: one alone must not go back for the sake of a line in a log.
            logger.exception("kvarena: the pool is resized, but this cannot be reported.")

    def _allowed_now(self) -> int:
        """Measured anew, less what SGLang and the operator keep free."""
        free = self.bound.driver.free_bytes() + self.bound.backed_bytes
        return self._within(max(0, free - self._reserve))

    def _keep_free(self) -> int:
        # SGLang's figure is an estimate, and SGLang itself may have taken a little of it since.
        return max(self._settings.headroom, self._reserve - self._reserve // 8)

    def _within(self, budget: int) -> int:
        """SGLang's budget, or less if a hook or the operator says so."""
        limit = self._settings.pool_bytes
        maximum = budget if limit is None else min(budget, limit)
        request = BudgetRequest(
            self.bound, self.bound.driver, headroom_bytes=self._settings.headroom, max_bytes=maximum
        )
        answer = self._manager.hook.kvarena_budget(request=request)
        return maximum if answer is None else min(maximum, int(answer))

    def _remember(self, owner: Any, name: str) -> None:
        before = getattr(owner, name)
        self.steps.undo(lambda: setattr(owner, name, before), f"setting {name} back")


@final
class _SglangSizer:
    """SGLang's solver, with the pool's bytes in the field that every release is asked for."""

    def __init__(
        self,
        bound: SglangPool,
        family: Family,
        solver: Callable[[int], Any],
        from_tokens: Callable[[int], Any],
    ) -> None:
        self._bound = bound
        self._family = family
        self._solver = solver
        self._from_tokens = from_tokens

    def for_budget(self, nbytes: int) -> Any:
        return self._with_bytes(self._solver(nbytes))

    def for_tokens(self, tokens: int) -> Any:
        return self._with_bytes(self._from_tokens(tokens))

    def _with_bytes(self, config: Any) -> Any:
        config.unified_memory_pool_bytes = self._bytes_of(config)
        return config

    def _bytes_of(self, config: Any) -> int:
        """The pool's bytes: in the release's own field, or the sum over both sides' tokens."""
        for name in self._family.budget_fields:
            value = getattr(config, name, None)
            if value is not None:
                return min(int(value), self._bound.reserved_bytes)
        full, window = (int(self._bound.spec(name).entry_bytes()) for name in ("full", "swa"))
        tokens = int(config.full_max_total_num_tokens), int(config.swa_max_total_num_tokens)
        return min(tokens[0] * full + tokens[1] * window, self._bound.reserved_bytes)
