"""What one engine has registered of a pool's arena, and how it follows the pool through its life."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from kvarena.hooks import hookimpl
from kvarena.plugin.engines.sglang.runtime import logger, runtime
from kvarena.transfer import Region, RegistrationLedger, TransferEngine

if TYPE_CHECKING:
    from kvarena.plugin.engines.sglang.bound import SglangPool

__all__ = ["PoolFollower", "tell"]


class PoolFollower(ABC):
    """A ledger over a pool's arena, and the hooks that keep it at what is backed.

    Parameters
    ----------
    bound : BoundPool
        Whose arena is registered.
    engine : TransferEngine
        With which.
    """

    def __init__(self, bound: SglangPool, engine: TransferEngine) -> None:
        self.bound = bound
        self.ledger = RegistrationLedger(engine, on_change=tell)
        bound.ledgers.append(self.ledger)
        runtime.manager.register(self)

    @abstractmethod
    def follow(self) -> None:
        """Register what is backed now."""

    @abstractmethod
    def close(self) -> None:
        """Unregister everything; a second call does nothing.

        Raises
        ------
        RegistrationError
            The engine refused; the memory of what it still holds must stay.
        """

    @property
    def stands(self) -> bool:
        """Whether it follows the pool: it was not closed, or an engine would not let go."""
        return runtime.manager.is_registered(self)

    @hookimpl(trylast=True)
    def kvarena_pool_resizing(self, pool: Any) -> None:
        """The arena's memory is about to be replaced."""
        if pool is self.bound:
            self._let_go()

    @hookimpl
    def kvarena_pool_finalized(self, pool: Any) -> None:
        """The arena has another size."""
        if pool is self.bound:
            self.follow()

    @hookimpl
    def kvarena_pool_reserved(self, pool: Any) -> None:
        """A resize was undone: the sink alone is registered again."""
        if pool is self.bound:
            self.follow()

    @hookimpl
    def kvarena_pool_closing(self, pool: Any) -> None:
        """Let go before the memory goes."""
        if pool is self.bound:
            self.close()

    def _move(self) -> float:
        """The ledger at what is backed; the milliseconds that it took."""
        arena = self.bound.arena
        backed = Region(arena.base, arena.backed_bytes)
        began = time.perf_counter()
        self.ledger.move_to([backed], backed=backed, handle_seams=arena.seams)
        return (time.perf_counter() - began) * 1e3

    def _let_go(self) -> None:
        """Unregister everything."""
        self.ledger.clear()

    def _leave(self) -> None:
        """The ledger is empty: nobody asks after it any more."""
        if self.ledger in self.bound.ledgers:
            self.bound.ledgers.remove(self.ledger)
        if self.stands:
            runtime.manager.unregister(self)

    def _report(self, event: str, milliseconds: float, **details: Any) -> None:
        if self.bound.report is not None:
            self.bound.report.timeline.add(
                event,
                nbytes=self.ledger.registered_bytes,
                address=self.bound.arena.base,
                milliseconds=milliseconds,
                engine=self.ledger.engine.name,
                backed=self.bound.arena.backed_bytes,
                regions=len(self.ledger.regions),
                **details,
            )


def tell(change: str, engine: TransferEngine, region: Region) -> None:
    """A ledger has changed: let the hooks know."""
    for failure in runtime.manager.call_every(f"kvarena_region_{change}", engine=engine, region=region):
        logger.error("kvarena: %s", failure)
