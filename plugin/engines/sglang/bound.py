"""kvarena's arena beneath a unified pool of SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

from kvarena.hooks.ledgers import LedgerKeeper
from kvarena.plugin.announcements import Announcements, Observer
from kvarena.plugin.closing import close_pool, raise_first
from kvarena.pool import PoolSizeError
from kvarena.pool.errors import PoolStateError
from kvarena.pool.resizable import BackedRegion, region_of

if TYPE_CHECKING:
    import torch
    from kvarena.hooks import HookManager
    from kvarena.pool import Arena, Driver
    from kvarena.transfer import RegistrationLedger

__all__ = ["SglangPool", "bound_of"]

_ATTRIBUTE = "_kvarena_bound"


@final
class SglangPool:
    """What kvarena's hooks are given inside SGLang, where they get its own pool elsewhere.

    It also stands where SGLang 0.5.22 and later keep the owner of their VMM memory, and answers as that
    does (`backed_bytes`, `ensure_prefix`, `close`).

    Parameters
    ----------
    pool : sglang's UnifiedKVPool
        Constructed on ``meta``; its views lie over `arena` by now.
    arena : Arena
        With the sink backed.
    manager : HookManager
        Of the plugins that hear of the pool.
    sink_bytes : int
        Bytes that captured graphs may write: the largest page envelope.
    floor_terms : sequence of (str, int)
        Bytes that one request needs at least, by what for.
    """

    post_capture_active = True

    def __init__(
        self,
        pool: Any,
        arena: Arena,
        manager: HookManager,
        *,
        sink_bytes: int,
        floor_terms: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.pool = pool
        self.arena = arena
        self.sink_bytes = sink_bytes
        self.floor_terms = tuple(floor_terms)
        self.reserved_bytes = int(pool.total_bytes)
        self.finalized = False
        self.closed = False
        self.on_close: list[Callable[[], object]] = []
        """What to do when the memory has gone, in this order."""
        self.keeper = LedgerKeeper(manager, self)
        """Of the engines of SGLang that know this pool."""
        self.keeper.attach()
        self.announce = Announcements(manager, None, lambda: self.ledgers, self._details)
        self._manager = manager
        self._eager_fields = _capacity_fields(pool)
        setattr(pool, _ATTRIBUTE, self)

    @property
    def ledgers(self) -> tuple[RegistrationLedger, ...]:
        """One for each transfer engine that knows this pool."""
        return self.keeper.ledgers

    @property
    def observer(self) -> Observer | None:
        """Who watches the pool."""
        return self.announce.observer

    @property
    def driver(self) -> Driver:
        """The device's virtual memory."""
        return self.arena.driver

    @property
    def device(self) -> torch.device:
        """Where the pool lives."""
        return self.arena.driver.device

    @property
    def raw(self) -> torch.Tensor:
        """SGLang's byte tensor over the whole reservation."""
        tensor: torch.Tensor = self.pool._raw
        return tensor

    @property
    def total_bytes(self) -> int:
        """Bytes that the pool's pages lie in: the reservation's before finalize."""
        return int(self.pool.total_bytes)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return int(self.pool._page_size)

    @property
    def sub_pool_specs(self) -> tuple[Any, ...]:
        """SGLang's descriptions of the sub-pools."""
        return tuple(self.pool.sub_pool_specs)

    @property
    def active_allocation_bytes(self) -> int:
        """Bytes that have memory and belong to the pool: its total, or the sink before finalize."""
        return self.total_bytes if self.finalized else self.sink_bytes

    @property
    def backed_bytes(self) -> int:
        """Bytes that handles hold: `active_allocation_bytes` rounded up to the granularity."""
        return self.arena.backed_bytes

    @property
    def post_capture_backed_bytes(self) -> int:
        """`backed_bytes`, by SGLang's name."""
        return self.arena.backed_bytes

    def backed_regions(self, keep_bytes: int | None = None) -> tuple[BackedRegion, ...]:
        """The arena; see `ResizablePool.backed_regions`."""
        return (region_of(self.arena, keep_bytes),)

    @property
    def floor_bytes(self) -> int:
        """Bytes below which one request would not fit."""
        one_page = max(
            (self.min_page_index(spec.name) + 1) * self.page_bytes(spec.name) for spec in self.sub_pool_specs
        )
        return max(one_page, sum(nbytes for _, nbytes in self.floor_terms))

    def spec(self, name: str) -> Any:
        """A sub-pool's description."""
        return self.pool.spec(name)

    def slots_per_page(self, name: str) -> int:
        """Slots in one page: 1 for states of requests."""
        return 1 if hasattr(self.spec(name), "conv_state_shapes") else self.page_size

    def page_bytes(self, name: str) -> int:
        """Bytes of one page envelope."""
        return int(self.spec(name).entry_bytes()) * self.slots_per_page(name)

    def num_pages(self, name: str) -> int:
        """Pages that lie wholly in `total_bytes`, the sink's among them."""
        return self.total_bytes // self.page_bytes(name)

    def min_page_index(self, name: str) -> int:
        """The first page past the sink."""
        return -(-int(self.pool.min_slot_index(name)) // self.slots_per_page(name))

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Address, backed bytes and page bytes of every sub-pool; all alias the same bytes."""
        names = [spec.name for spec in self.sub_pool_specs]
        lens = [self.active_allocation_bytes] * len(names)
        return [self.arena.base] * len(names), lens, [self.page_bytes(name) for name in names]

    def check_total_bytes(self, total_bytes: Any) -> int:
        """The pool's bytes, if it can have that many.

        Raises
        ------
        PoolSizeError
            No count, more than is reserved, or too few for one request; the error names the terms.
        """
        minimum, maximum = self.floor_bytes, self.reserved_bytes
        if isinstance(total_bytes, bool) or not isinstance(total_bytes, int):
            raise PoolSizeError(
                f"config.unified_memory_pool_bytes is {total_bytes!r}, no count of bytes.",
                requested=None,
                minimum=minimum,
                maximum=maximum,
            )
        if total_bytes > maximum:
            raise PoolSizeError(
                f"{total_bytes} bytes do not fit the {maximum} that are reserved.",
                requested=total_bytes,
                minimum=minimum,
                maximum=maximum,
            )
        if total_bytes < minimum:
            terms = ", ".join(f"{name} {nbytes}" for name, nbytes in self.floor_terms) or "one page of each"
            raise PoolSizeError(
                f"{total_bytes} bytes cannot hold one request, which needs {minimum} ({terms}).",
                requested=total_bytes,
                minimum=minimum,
                maximum=maximum,
                fix="Raise --mem-fraction-static, lower --context-length, or free memory on the device.",
            )
        return total_bytes

    def check_finalize(self, config: Any) -> int:
        """The size that `finalize_backing` would take; raises what that raises, and changes nothing."""
        if self.finalized or self.closed:
            state = "closed" if self.closed else "finalized already"
            raise PoolStateError(f"This pool is {state}.")
        return self.check_total_bytes(getattr(config, "unified_memory_pool_bytes", None))

    def finalize_backing(self, config: Any) -> None:
        """Swap the sink's handle for one over the final size, and give SGLang's pool that size.

        Raises
        ------
        OutOfMemoryError, DriverError
            The sink is as it was.
        PoolSizeError, PoolStateError
            The pool cannot have this size, or has its size already.
        """
        total_bytes = self.check_finalize(config)
        self.arena.back(total_bytes)
        pool = self.pool
        pool.total_bytes = total_bytes
        pool._max_slots = {spec.name: total_bytes // spec.entry_bytes() for spec in pool.sub_pool_specs}
        if hasattr(pool, "_accessible_bytes"):
            pool._accessible_bytes = total_bytes
        self.finalized = True

    def revert_finalize(self) -> None:
        """Back to the sink alone, and to the fields of the reservation.

        Raises
        ------
        DriverError
            The sink cannot be backed again.
        PoolStateError
            A transfer engine still holds memory that would go.
        """
        held = [ledger.engine.name for ledger in self.ledgers if ledger.regions]
        if held:
            raise PoolStateError(f"{', '.join(held)} still holds registrations; the memory stays.")
        for name, value in self._eager_fields.items():
            setattr(self.pool, name, value)
        if hasattr(self.pool, "_accessible_bytes"):
            self.pool._accessible_bytes = self.sink_bytes
        self.finalized = False
        # Released first: the final size may have left no room for even the sink beside it.
        self.arena.shrink_to_zero()
        self.arena.back(self.sink_bytes)

    def ensure_prefix(self, num_tokens: int) -> None:
        """Asked by SGLang's code for its own owner, one token a byte; the sink is there from the start.

        Raises
        ------
        PoolStateError
            More than what is backed is asked for: sizes are taken by finalize alone.
        """
        if num_tokens > self.arena.backed_bytes:
            raise PoolStateError(
                f"{num_tokens} bytes were asked for outside of finalize, but {self.backed_bytes} are backed."
            )

    def close(self) -> None:
        """Tell everyone, then let go of the memory; a second call does nothing, or finishes what failed.

        Raises
        ------
        KvArenaError
            A plugin, an engine or the driver failed. Memory that an engine still holds stays mapped, and
            the next call tries again.
        """
        if not self.closed:
            raise_first(close_pool(self._manager, self, lambda: self.ledgers, self._release))

    def _release(self) -> None:
        self.arena.close()
        self.closed = True
        self.keeper.detach()
        while self.on_close:
            self.on_close.pop(0)()
        if self.observer is not None:
            self.observer.close()

    def _details(self, ledger: RegistrationLedger) -> dict[str, Any]:
        return {"backed": self.arena.backed_bytes, **self.keeper.details_of(ledger)}


def bound_of(owner: Any) -> SglangPool | None:
    """The arena beneath one of SGLang's pools or allocators; None: it is stock's own memory."""
    for pool in _pools_of(owner):
        bound = getattr(pool, _ATTRIBUTE, None)
        if isinstance(bound, SglangPool):
            return bound
    return None


def _pools_of(owner: Any) -> Iterable[Any]:
    yield owner
    for name in ("unified_buffer", "_unified_buffer"):
        yield vars(owner).get(name) if hasattr(owner, "__dict__") else None


def _capacity_fields(pool: Any) -> dict[str, Any]:
    return {"total_bytes": pool.total_bytes, "_max_slots": dict(pool._max_slots)}
