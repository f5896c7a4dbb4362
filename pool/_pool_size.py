"""Which sizes a pool may have."""

from __future__ import annotations

from collections.abc import Sequence

from kvarena.pool._counts import as_count
from kvarena.pool.budget import packed_bytes
from kvarena.pool.errors import LayoutError, PoolSizeError
from kvarena.pool.layout import SubPoolSpec

__all__ = ["check_size", "floor_bytes"]


def floor_bytes(chain: Sequence[SubPoolSpec], page_size: int, terms: Sequence[tuple[str, int]]) -> int:
    """The smallest size in which one request fits: the sink and the pages it needs, at least one of each.

    Parameters
    ----------
    chain : sequence of SubPoolSpec
        In the order of `chain_order`.
    page_size : int
        Tokens a page.
    terms : sequence of (str, int)
        Sub-pool names and the slots of each that a single request needs.

    Raises
    ------
    LayoutError
        A term names a sub-pool that does not exist, or its slots are not a count.
    """
    pages = {spec.name: 1 for spec in chain}
    slots_per_page = {spec.name: spec.slots_per_page(page_size) for spec in chain}
    for name, slots in terms:
        if name not in pages:
            raise LayoutError(
                f"A floor term names {name!r}, which is not a sub-pool.",
                fix=f"The names are: {', '.join(pages)}.",
            )
        count = as_count(slots)
        if count is None or count < 0:
            raise LayoutError(f"The floor of {name!r} is {slots!r} slots.", fix="Give 0 or more.")
        pages[name] = max(pages[name], -(-count // slots_per_page[name]))
    return packed_bytes((spec.page_envelope_bytes(page_size), pages[spec.name]) for spec in chain)


def check_size(total_bytes: object, *, minimum: int, maximum: int) -> int:
    """`total_bytes`, if it is a byte count from `minimum` to `maximum`.

    Raises
    ------
    PoolSizeError
        It is not a byte count, above the reservation, or below the floor for one request.
    """
    size = as_count(total_bytes)
    if size is None:
        raise PoolSizeError(
            f"The size of the pool is missing: {total_bytes!r} is not a byte count.",
            requested=None,
            minimum=minimum,
            maximum=maximum,
            fix="Set unified_memory_pool_bytes to a whole number of bytes.",
        )
    if size < minimum:
        raise PoolSizeError(
            f"{size} bytes are too few: one request needs {minimum}, the sink included.",
            requested=size,
            minimum=minimum,
            maximum=maximum,
            fix="Give the pool more memory, or lower the context length or the page size.",
        )
    if size > maximum:
        raise PoolSizeError(
            f"{size} bytes are more than the {maximum} that were reserved.",
            requested=size,
            minimum=minimum,
            maximum=maximum,
            fix="Reserve more before capture, or finalize to less.",
        )
    return size
