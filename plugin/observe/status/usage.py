"""How live and free pages of each sub-pool become known, whoever allocates them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

__all__ = ["AllocatorUsage", "PageAllocator", "PageUsage", "UsageSource", "usage_of"]


class PageUsage(NamedTuple):
    """Pages of one sub-pool."""

    live: int
    free: int
    """Pages that an allocation could get now."""


@runtime_checkable
class UsageSource(Protocol):
    """An engine's answer to the question which pages are in use.

    It is asked from other threads than the engine's, a few times a second: it must be cheap, must
    not wait for the device, and may answer with numbers that are a moment old.
    """

    def page_usage(self) -> Mapping[str, PageUsage]:
        """Pages of each sub-pool, by its name."""
        ...


class PageAllocator(Protocol):
    """What `AllocatorUsage` reads of an allocator of one sub-pool, as `MultiEndedAllocator` has it."""

    @property
    def sub_pool_name(self) -> str:
        """Of the pool."""
        ...

    @property
    def page_size(self) -> int:
        """Slots a page."""
        ...

    def available_size(self) -> int:
        """Slots that can be taken now."""
        ...

    def allocated_count(self) -> int:
        """Slots in pages that are in use."""
        ...


@final
class AllocatorUsage:
    """The usage of a pool whose sub-pools have an allocator each.

    Parameters
    ----------
    allocators : iterable of PageAllocator
        One for each sub-pool.
    """

    def __init__(self, allocators: Iterable[PageAllocator]) -> None:
        self._allocators = tuple(allocators)

    def page_usage(self) -> Mapping[str, PageUsage]:
        """Pages of each sub-pool, by its name."""
        return {
            each.sub_pool_name: PageUsage(
                each.allocated_count() // each.page_size, each.available_size() // each.page_size
            )
            for each in self._allocators
        }


def usage_of(allocator: object) -> UsageSource | None:
    """What an allocator, or a composite of several, can say about pages; None: nothing.

    A source answers for itself; of a composite, every attribute that looks like the allocator of one
    sub-pool is asked.
    """
    if isinstance(allocator, UsageSource):
        return allocator
    found = [each for each in (allocator, *_parts(allocator)) if _is_page_allocator(each)]
    return AllocatorUsage(found) if found else None


def _parts(composite: object) -> list[Any]:
    values = getattr(composite, "__dict__", {}).values()
    parts: list[Any] = []
    for value in values:
        parts += value if isinstance(value, list | tuple) else [value]
    return parts


def _is_page_allocator(value: object) -> bool:
    return all(
        hasattr(value, name) for name in ("sub_pool_name", "page_size", "available_size", "allocated_count")
    )
