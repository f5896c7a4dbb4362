"""What a pool's life asks of the allocators above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvarena.pool import PostCaptureKVResize

__all__ = ["ElasticAllocator", "ResizableAllocator"]


class ResizableAllocator(Protocol):
    """What finalize asks of the allocators above a pool."""

    def resize(self, config: PostCaptureKVResize) -> None:
        """Take the pool's final size; refused while anything is allocated."""
        ...

    def revert_resize(self) -> None:
        """Take the reservation's size again, because a finalize is taken back."""
        ...


class ElasticAllocator(Protocol):
    """What growing and shrinking ask of the allocators, with requests in flight."""

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
