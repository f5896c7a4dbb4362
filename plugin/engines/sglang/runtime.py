"""What this process knows: its settings, whether the hooks stand, what was decided, and its pools."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from kvarena.hooks import HookManager
    from kvarena.plugin.config import Settings
    from kvarena.plugin.engines.sglang.bound import SglangPool
    from kvarena.plugin.engines.sglang.families.choice import Choice
    from kvarena.plugin.engines.sglang.families.targets import Family, Support

__all__ = ["Runtime", "runtime"]

logger = logging.getLogger("kvarena.sglang")


@final
class Runtime:
    """State of one process; SGLang's hooks are process-wide, so there is one."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.choice: Choice | None = None
        """What was chosen for this release; `family` and `support` are taken from it."""
        self.family: Family | None = None
        self.support: Support | None = None
        self.release = ""
        self.attached = False
        self.planned: bool | None = None
        """What the planner said last for a unified pool; None: it was not asked."""
        self.unmodified_bytes: int | None = None
        """What the unmodified release would have given the pool, from before capture; None: not known."""
        self.pools: list[SglangPool] = []
        self._manager: HookManager | None = None
        self._problems: list[str] | None = None
        self._said: set[str] = set()
        self._lock = threading.Lock()

    @property
    def manager(self) -> HookManager:
        """kvarena's own hooks, made when first needed: third parties may import a lot."""
        if self._manager is None:
            from kvarena.plugin.composition import make_manager
            from kvarena.plugin.config import Settings

            self._manager = make_manager(self.settings or Settings(enable=True))
        return self._manager

    def problems(self) -> list[str]:
        """Why the hooks may not act: targets that were not applied, or that somebody else changed too."""
        if not self.attached or self.choice is None:
            return ["kvarena is not attached to this process"]
        if self._problems is None:
            from kvarena.plugin.engines.sglang.applied import application_problems

            self._problems = application_problems(self.choice)
        return self._problems

    def acts(self) -> bool:
        """Whether every target of the release stands; otherwise SGLang runs unmodified."""
        return not self.problems()

    def pool_at(self, address: int) -> SglangPool | None:
        """The pool whose addresses hold this one."""
        for pool in self.pools:
            if pool.arena.base <= address < pool.arena.base + pool.arena.reserved_bytes:
                return pool
        return None

    def log_once(self, level: int, message: str) -> None:
        """Log a line the first time only: SGLang asks its planner several times in each process."""
        with self._lock:
            if message in self._said:
                return
            self._said.add(message)
        logger.log(level, "%s", message)

    def reset(self) -> None:
        """Forget everything; for tests, which attach several times in one process."""
        self.__init__()


runtime = Runtime()
