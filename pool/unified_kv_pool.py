"""One arena for several kinds of KV, sized before or after capture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

from kvarena.pool._pool_size import check_size, floor_bytes
from kvarena.pool._views import build_views
from kvarena.pool.arena import Arena, ArenaState
from kvarena.pool.errors import (
    DescriptorLimitError,
    LayoutError,
    OutOfMemoryError,
    PoolSizeError,
    PoolStateError,
)
from kvarena.pool.layout import SubPoolSpec, chain_order
from kvarena.pool.resizable import BackedRegion, region_of

if TYPE_CHECKING:
    import torch
    from kvarena.pool.driver import Driver

__all__ = ["ContiguousBufInfos", "UnifiedKVPool"]


class ContiguousBufInfos(NamedTuple):
    """Three lists of one length, an entry for each sub-pool."""

    ptrs: list[int]
    lens: list[int]
    """Bytes that have memory."""
    item_lens: list[int]
    """Bytes of one page envelope."""


class _Shrink(NamedTuple):
    """What `UnifiedKVPool.revert_shrink` goes back to."""

    total_bytes: int
    releases: bool
    """Whether handles were released."""


@final
class UnifiedKVPool:
    """Sub-pools that share the bytes of one arena: one grows up, one down, others float between.

    Page p of every sub-pool starts at byte p × its envelope, so addresses do
    not depend on the pool's size. The first `sink_bytes` hold page 0 of all of
    them: captured graphs write their dummy KV there, and no allocator gives
    it out.

    A pool that is not `post_capture_active` is *eager*: all its bytes are
    backed in the constructor. Otherwise only the sink is, until
    `finalize_backing`.

    Parameters
    ----------
    total_bytes : int
        Bytes of the pool, or of the largest that it may become.
    sub_pool_specs : sequence of SubPoolSpec
        What to lay out. At most one grows up and at most one down.
    driver : Driver
        The device's virtual memory.
    page_size : int
        Tokens a page.
    post_capture_active : bool
        Whether the size is decided after capture.
    bs1_floor_terms : sequence of (str, int)
        Sub-pool names and the slots of each that a single request needs.

    Raises
    ------
    LayoutError
        The sub-pools cannot be laid out, or a floor term names none of them.
    PoolSizeError
        `total_bytes` is below the floor for one request.
    OutOfMemoryError, DriverError
        The device refused; nothing is left behind.
    """

    def __init__(
        self,
        *,
        total_bytes: int,
        sub_pool_specs: Sequence[SubPoolSpec],
        driver: Driver,
        page_size: int = 1,
        post_capture_active: bool = False,
        bs1_floor_terms: Sequence[tuple[str, int]] = (),
    ) -> None:
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise LayoutError(f"page_size is {page_size!r}.", fix="Give a positive whole number.")
        self.sub_pool_specs = chain_order(sub_pool_specs)
        self.page_size = page_size
        self.post_capture_active = post_capture_active
        self._specs = {spec.name: spec for spec in self.sub_pool_specs}
        self._page_bytes = {s.name: s.page_envelope_bytes(page_size) for s in self.sub_pool_specs}
        self.sink_bytes = max(self._page_bytes.values())
        self.floor_bytes = floor_bytes(self.sub_pool_specs, page_size, bs1_floor_terms)
        self.reserved_bytes = check_size(total_bytes, minimum=self.floor_bytes, maximum=sys.maxsize)
        self.total_bytes = self.reserved_bytes
        self.finalized = not post_capture_active
        self.driver = driver
        self._before_shrink: _Shrink | None = None
        self.arena = Arena(driver, self.reserved_bytes)
        try:
            self.arena.back(self.active_allocation_bytes)
            self.raw = self.arena.tensor[: self.reserved_bytes]
            self._views = {
                spec.name: build_views(self.raw, spec, page_size, self.reserved_num_pages(spec.name))
                for spec in self.sub_pool_specs
            }
        except BaseException:
            self.arena.close()
            raise

    @property
    def device(self) -> torch.device:
        """Where the pool lives."""
        return self.driver.device

    @property
    def active_allocation_bytes(self) -> int:
        """Bytes that have memory and belong to the pool: its total, or the sink before finalize."""
        return self.total_bytes if self.finalized else self.sink_bytes

    @property
    def post_capture_backed_bytes(self) -> int:
        """Bytes that handles hold: `active_allocation_bytes` rounded up to the granularity."""
        return self.arena.backed_bytes

    def spec(self, name: str) -> SubPoolSpec:
        """A sub-pool's description. Raises `LayoutError` for a name that is not there."""
        try:
            return self._specs[name]
        except KeyError:
            raise LayoutError(
                f"There is no sub-pool {name!r}.", fix=f"The names are: {', '.join(self._specs)}."
            ) from None

    def page_bytes(self, name: str) -> int:
        """Bytes of one page envelope."""
        return self._page_bytes[self.spec(name).name]

    def slots_per_page(self, name: str) -> int:
        """`page_size`; 1 for states of requests."""
        return self.spec(name).slots_per_page(self.page_size)

    def num_pages(self, name: str) -> int:
        """Pages that lie wholly in `total_bytes`, the sink's among them."""
        return self.total_bytes // self.page_bytes(name)

    def reserved_num_pages(self, name: str) -> int:
        """`num_pages` of the largest size: what tables and views that must not move are made for."""
        return self.reserved_bytes // self.page_bytes(name)

    def min_page_index(self, name: str) -> int:
        """The first page that lies wholly behind the sink."""
        return -(-self.sink_bytes // self.page_bytes(name))

    def max_slots(self, name: str) -> int:
        """Physical slots of `num_pages`: no physical id of an allocator reaches it.

        Virtual ids may, after a shrink; their bound is the allocator's `max_slots`.
        """
        return self.num_pages(name) * self.slots_per_page(name)

    def min_slot_index(self, name: str) -> int:
        """The first slot of `min_page_index`."""
        return self.min_page_index(name) * self.slots_per_page(name)

    def view(self, name: str, layer: int, part: str) -> torch.Tensor:
        """A layer's tensor, ``(reserved_num_pages, *shape of a page)``, always the same object.

        Raises
        ------
        LayoutError
            There is no such sub-pool, layer or part.
        """
        views = self._views[self.spec(name).name]
        try:
            return views[layer, part]
        except KeyError:
            parts = sorted({key[1] for key in views})
            raise LayoutError(
                f"Sub-pool {name!r} has no {part!r} in layer {layer!r}.",
                fix=f"It has {', '.join(parts)} in layers 0 to {self.spec(name).layer_num - 1}.",
            ) from None

    def k_view(self, name: str, layer: int) -> torch.Tensor:
        """A layer's keys, ``(reserved_num_pages, page_size, heads, dim)``; for MLA the whole latent."""
        return self.view(name, layer, "k")

    def v_view(self, name: str, layer: int) -> torch.Tensor:
        """A layer's values, shaped as `k_view`; for MLA the latent without its rotary key."""
        return self.view(name, layer, "v")

    def page_address(self, name: str, page: int) -> int:
        """The address of a page of the reservation. Raises `LayoutError` for one outside it."""
        if not 0 <= page < self.reserved_num_pages(name):
            raise LayoutError(
                f"Sub-pool {name!r} has no page {page}.",
                fix=f"Its last is {self.reserved_num_pages(name) - 1}.",
            )
        return self.arena.base + page * self.page_bytes(name)

    def check_total_bytes(self, total_bytes: object) -> int:
        """`total_bytes` as an int, if the pool may have this size.

        Raises
        ------
        PoolSizeError
            Not a byte count, above the reservation, or below the floor for one request.
        """
        return check_size(total_bytes, minimum=self.floor_bytes, maximum=self.reserved_bytes)

    def finalize_backing(self, config: Any) -> None:
        """Back the final size in place; no address changes, and every byte is zero.

        Parameters
        ----------
        config : object
            Its `unified_memory_pool_bytes` is the final size.

        Raises
        ------
        PoolStateError
            The pool is eager, closed, or final already.
        PoolSizeError
            Not a byte count, above the reservation, or below the floor for one request.
        OutOfMemoryError, DriverError
            The device refused. In every case the pool is unchanged.
        """
        total_bytes = self.check_finalize(config)
        self.arena.back(total_bytes)
        self.total_bytes = total_bytes
        self.finalized = True

    def check_finalize(self, config: Any) -> int:
        """The size that `finalize_backing` would take; raises what that raises, and changes nothing."""
        self._require_open("be finalized")
        if not self.post_capture_active:
            raise PoolStateError(
                f"An eager pool has its {self.total_bytes} bytes already.",
                fix="Make it with post_capture_active=True to size it after capture.",
            )
        if self.finalized:
            raise PoolStateError(
                f"The pool is final already, with {self.total_bytes} bytes.", fix="Use grow() or shrink()."
            )
        return self.check_total_bytes(getattr(config, "unified_memory_pool_bytes", None))

    def revert_finalize(self) -> None:
        """Take `finalize_backing` back: the sink alone is backed, with zeros.

        For whoever composes finalize with steps that may fail after it.

        Raises
        ------
        PoolStateError
            The pool is eager, closed, or not final yet.
        OutOfMemoryError, DriverError
            The device refused.
        """
        self._require_resizable("go back to its sink")
        try:
            self.arena.back(self.sink_bytes)
        except (DescriptorLimitError, OutOfMemoryError):
            # The pool may hold the last free byte or descriptor, and nothing in it is wanted any more.
            self.arena.shrink_to_zero()
            self.arena.back(self.sink_bytes)
        self._before_shrink = None
        self.total_bytes = self.reserved_bytes
        self.finalized = False

    def grow(self, total_bytes: int) -> None:
        """Add memory behind what is there, which keeps its contents.

        Parameters
        ----------
        total_bytes : int
            The new size of the pool.

        Raises
        ------
        PoolStateError
            The pool is eager, closed, or not final yet.
        PoolSizeError
            It is not more than now, or more than was reserved.
        OutOfMemoryError, DriverError
            The device refused. In every case the pool is unchanged.
        """
        self._require_resizable("grow")
        total_bytes = self.check_total_bytes(total_bytes)
        if total_bytes <= self.total_bytes:
            raise PoolSizeError(
                f"The pool has {self.total_bytes} bytes and cannot grow to {total_bytes}.",
                requested=total_bytes,
                minimum=self.total_bytes + 1,
                maximum=self.reserved_bytes,
                fix="Use shrink() for less.",
            )
        self.arena.grow(total_bytes)
        self._before_shrink = None
        self.total_bytes = total_bytes

    def shrink(self, total_bytes: int) -> None:
        """Release the handles behind a size; the caller has moved what lived there.

        Parameters
        ----------
        total_bytes : int
            The new size; rounded up to the granularity it is where a handle ends.

        Raises
        ------
        PoolStateError
            The pool is eager, closed, or not final yet.
        PoolSizeError
            Below the floor for one request, or not less than now.
        ArenaStateError
            The size is inside a handle; the nearest that are not are named.
        DriverError
            The device refused. In every case the pool is unchanged.
        """
        total_bytes, backed = self._checked_shrink(total_bytes)
        releases = backed < self.arena.backed_bytes  # else only bytes that rounding up had added change hands
        if releases:
            self.arena.shrink(backed)
        self._before_shrink = _Shrink(self.total_bytes, releases)
        self.total_bytes = total_bytes

    def revert_shrink(self) -> None:
        """Take the last `shrink` back: its size and handles of the same sizes again, with zeros.

        For whoever composes it with steps that may fail after it. `grow` to the
        former size would join the handles, and sizes between them, to which the
        pool could shrink before, would be refused from then on.

        Raises
        ------
        PoolStateError
            The pool is eager, closed or not final yet, or was not shrunk since
            its size last changed in another way.
        OutOfMemoryError, DriverError
            The device refused; the pool is unchanged.
        """
        self._require_resizable("take a shrink back")
        before = self._before_shrink
        if before is None:
            raise PoolStateError(
                f"The pool's {self.total_bytes} bytes are not what a shrink left: nothing to take back.",
                fix="Call it right after shrink(), or use grow().",
            )
        if before.releases:
            self.arena.revert_shrink()
        self.total_bytes = before.total_bytes
        self._before_shrink = None

    def check_shrink(self, total_bytes: int) -> int:
        """The size that `shrink` would take; raises what that raises, and changes nothing."""
        return self._checked_shrink(total_bytes)[0]

    def _checked_shrink(self, total_bytes: int) -> tuple[int, int]:
        self._require_resizable("shrink")
        total_bytes = self.check_total_bytes(total_bytes)
        if total_bytes >= self.total_bytes:
            raise PoolSizeError(
                f"The pool has {self.total_bytes} bytes and cannot shrink to {total_bytes}.",
                requested=total_bytes,
                minimum=self.floor_bytes,
                maximum=self.total_bytes - 1,
                fix="Use grow() to enlarge.",
            )
        granularity = self.driver.granularity
        backed = -(-total_bytes // granularity) * granularity
        if backed < self.arena.backed_bytes:
            self.arena.check_shrink(backed)
        return total_bytes, backed

    def backed_regions(self, keep_bytes: int | None = None) -> tuple[BackedRegion, ...]:
        """The arena; see `ResizablePool.backed_regions`."""
        return (region_of(self.arena, keep_bytes),)

    def get_contiguous_buf_infos(self, name: str | None = None) -> ContiguousBufInfos:
        """What a transfer engine may register: only bytes that have memory.

        Parameters
        ----------
        name : str, optional
            One sub-pool; None: all, in the order of `sub_pool_specs`. They
            alias the same bytes, so all report the same pointer and length.
        """
        names = list(self._specs) if name is None else [self.spec(name).name]
        return ContiguousBufInfos(
            ptrs=[self.arena.base] * len(names),
            lens=[self.active_allocation_bytes] * len(names),
            item_lens=[self._page_bytes[each] for each in names],
        )

    def close(self) -> None:
        """Give everything back; see `Arena.close`. The views must not be touched any more."""
        self.arena.close()

    def _require_open(self, what: str) -> None:
        if self.arena.state is not ArenaState.BACKED:
            raise PoolStateError(
                f"The pool's arena is {self.arena.state.value}; it cannot {what}.",
                fix="Close it and make a new one.",
            )

    def _require_resizable(self, what: str) -> None:
        self._require_open(what)
        if not self.post_capture_active:
            raise PoolStateError(
                f"An eager pool cannot {what}.", fix="Make it with post_capture_active=True."
            )
        if not self.finalized:
            raise PoolStateError(
                f"The pool is not final yet and cannot {what}.", fix="Call finalize_backing() first."
            )
