"""What a pool must offer so that it can be sized late, whoever owns its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from kvarena.pool.arena import Arena
    from kvarena.pool.driver import Driver
    from kvarena.pool.sizing import PostCaptureKVResize

__all__ = [
    "BackedRegion",
    "ElasticAllocator",
    "ElasticPool",
    "ResizableAllocator",
    "ResizablePool",
    "UnifiedPool",
    "region_of",
]


class BackedRegion(NamedTuple):
    """One range of addresses of which a prefix has memory."""

    address: int
    backed_bytes: int
    """Bytes from `address` that handles hold: whole granules, which network cards can register."""
    reserved_bytes: int
    seams: tuple[int, ...] = ()
    """Absolute addresses, within the prefix, where two handles meet."""


class ResizablePool(Protocol):
    """A pool whose addresses stand before its size does.

    It lies in one region or in several (one for each layer, say); all of them are backed or none is.
    """

    @property
    def device(self) -> torch.device:
        """Where the pool lives."""
        ...

    @property
    def driver(self) -> Driver:
        """The virtual memory of the device."""
        ...

    @property
    def finalized(self) -> bool:
        """Whether the final size is backed; before, the sink alone is."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes that pages lie in; before finalize those of the reservation."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """The largest size."""
        ...

    @property
    def floor_bytes(self) -> int:
        """The smallest size: what one request needs, the sink included."""
        ...

    @property
    def active_allocation_bytes(self) -> int:
        """Bytes that have memory and belong to the pool: its total, or the sink before finalize."""
        ...

    def backed_regions(self, keep_bytes: int | None = None) -> Sequence[BackedRegion]:
        """Where memory is now; with `keep_bytes`, where it still is when the pool has shrunk to that."""
        ...

    def get_contiguous_buf_infos(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Address, backed bytes that belong to the pool, and bytes of an item, for each buffer."""
        ...

    def check_total_bytes(self, total_bytes: object) -> int:
        """`total_bytes`, if the pool may have this size; else `PoolSizeError`."""
        ...

    def check_finalize(self, config: Any) -> int:
        """The size that `finalize_backing` would take; raises what that raises, and changes nothing."""
        ...

    def finalize_backing(self, config: Any) -> None:
        """Back ``config.unified_memory_pool_bytes`` in place; a failed call changes nothing."""
        ...

    def revert_finalize(self) -> None:
        """Take `finalize_backing` back: the sink alone is backed."""
        ...

    def close(self) -> None:
        """Let go of the memory; nothing may be registered over it any more."""
        ...


class ElasticPool(ResizablePool, Protocol):
    """A pool that also changes its size while it serves."""

    def grow(self, total_bytes: int) -> None:
        """Add memory behind what is there, up to `total_bytes`."""
        ...

    def check_shrink(self, total_bytes: int) -> int:
        """The size that `shrink` would take; raises what that raises, and changes nothing."""
        ...

    def shrink(self, total_bytes: int) -> None:
        """Release the memory behind `total_bytes`; the caller has moved what lived there."""
        ...

    def revert_shrink(self) -> None:
        """Take the last `shrink` back: its size, and handles of the same sizes, with zeros."""
        ...


class UnifiedPool(ResizablePool, Protocol):
    """A pool of which every sub-pool lies over the whole of one arena; what a status can show."""

    @property
    def arena(self) -> Arena:
        """The one arena that all sub-pools lie in."""
        ...

    @property
    def post_capture_active(self) -> bool:
        """Whether the size is decided after capture; False: an eager pool."""
        ...

    @property
    def sink_bytes(self) -> int:
        """Bytes that captured graphs may write before finalize."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        ...

    @property
    def sub_pool_specs(self) -> Sequence[Any]:
        """A ``name`` and a ``grow_direction`` each."""
        ...

    def slots_per_page(self, name: str) -> int:
        """Slots in a page of this sub-pool: 1 for states of requests."""
        ...

    def page_bytes(self, name: str) -> int:
        """Bytes of one page envelope."""
        ...

    def num_pages(self, name: str) -> int:
        """Pages that lie wholly in `total_bytes`, the sink's among them."""
        ...

    def min_page_index(self, name: str) -> int:
        """The first page behind the sink."""
        ...


class ResizableAllocator(Protocol):
    """An allocator that joins a finalize.

    Every bound that it tells (``max_slots``, ``size``, ...) holds for every id that is out: it is never
    below one of them, before, during and after a resize.
    """

    def resize(self, config: PostCaptureKVResize) -> None:
        """Take the size that the pool has by now; refused while anything is allocated."""
        ...

    def revert_resize(self) -> None:
        """Take the size of the reservation again. Allocates nothing on the device."""
        ...


class ElasticAllocator(Protocol):
    """An allocator that joins growth and shrinking with ids out; its bounds hold as there."""

    @property
    def max_slots(self) -> int:
        """The bound of token ids: all that are out or can be given out are below it, after a shrink too."""
        ...

    def grow(self) -> None:
        """Take the pool's size, which has grown."""
        ...

    def shrink(self, total_bytes: int) -> int:
        """Move live pages below `total_bytes` and allocate none above, or raise; returns how many moved."""
        ...


def region_of(arena: Arena, keep_bytes: int | None = None) -> BackedRegion:
    """An arena as the one region of a pool; see `ResizablePool.backed_regions`."""
    backed = arena.backed_bytes
    if keep_bytes is not None:
        granularity = arena.driver.granularity
        backed = min(backed, -(-keep_bytes // granularity) * granularity)
    seams = tuple(seam for seam in arena.seams if seam < arena.base + backed)
    return BackedRegion(arena.base, backed, arena.reserved_bytes, seams)
