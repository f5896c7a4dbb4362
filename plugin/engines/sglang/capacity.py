"""The fields of SGLang's pools and allocators that depend on the pool's size, set together or restored."""

from __future__ import annotations

from typing import Any, final

from kvarena.plugin.engines.sglang.bound import SglangPool
from kvarena.plugin.engines.sglang.families.targets import Family, SizeRule
from kvarena.pool.errors import AllocatorError, PoolStateError

__all__ = ["Saved", "check_resizable", "take_capacity"]


@final
class Saved:
    """Attributes as they were, to go back to."""

    def __init__(self) -> None:
        self._values: list[tuple[Any, str, Any]] = []
        self._whole: list[tuple[Any, dict[str, Any]]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Change an attribute and remember what it was."""
        self._values.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def keep(self, owner: Any) -> None:
        """Remember every attribute: the very objects, so that going back allocates nothing on the device."""
        self._whole.append((owner, dict(vars(owner))))

    def restore(self) -> None:
        """Put everything back, last first."""
        for owner, name, value in reversed(self._values):
            setattr(owner, name, value)
        for owner, attributes in reversed(self._whole):
            vars(owner).clear()
            vars(owner).update(attributes)
        self._values.clear()
        self._whole.clear()


def check_resizable(allocator: Any, bound: SglangPool, config: Any) -> None:
    """Refuse what a resize would corrupt; nothing is changed.

    Raises
    ------
    PoolStateError
        The pool was not finalized, or to another size.
    AllocatorError
        Something is allocated.
    """
    nbytes = getattr(config, "unified_memory_pool_bytes", None)
    if not bound.finalized:
        raise PoolStateError(
            "The allocators are resized before the pool is finalized.", fix="Call finalize_backing first."
        )
    if nbytes is None or int(nbytes) != bound.total_bytes:
        raise PoolStateError(
            f"config.unified_memory_pool_bytes is {nbytes}, but the pool has {bound.total_bytes} bytes."
        )
    for side in (allocator.full_attn_allocator, allocator.swa_attn_allocator):
        live = side.allocated_count()
        if live or side._pending_reuse:
            raise AllocatorError(
                f"The allocator of sub-pool {side.sub_pool_name!r} cannot be resized: {live} tokens are "
                f"allocated and {len(side._pending_reuse)} batches of pages wait for reuse."
            )


def take_capacity(allocator: Any, bound: SglangPool, config: Any, family: Family) -> Saved:
    """Give a hybrid-SWA allocator, its pools and their parts the size that the pool has now.

    Every field ends as in an allocator that was built over a pool of this size (measured by comparing
    the two in each release); the page tables keep their storage, which captured graphs hold.

    Returns
    -------
    Saved
        Restores everything.
    """
    saved = Saved()
    try:
        _take(saved, allocator, bound, config, family)
    except BaseException:
        saved.restore()
        raise
    return saved


def _take(saved: Saved, allocator: Any, bound: SglangPool, config: Any, family: Family) -> None:
    pool, kv = bound.pool, allocator._kvcache
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
    for side in (full, window):
        # Nothing is allocated: its tables say the same before `clear` and after it, and keep their storage.
        saved.keep(side)
        slots = pool.max_slots(side.sub_pool_name)
        pages = slots // _physical_page_size(side)
        for name, value in (("num_pages", pages), ("max_slots", slots), ("size", slots)):
            saved.set(side, name, value)
        # The window side binds ids that the full side mints, unless it has only its own (up to 0.5.19).
        owner = side if side is full or family.own_virtual_ids else full
        saved.set(side, "num_virtual_ids", owner.num_pages)
        if hasattr(side, "_move_max_pages"):
            saved.set(side, "_move_max_pages", min(side._move_max_pages, pages))
        side.clear()
    if hasattr(allocator, "_joint_avail_memo_epoch"):
        saved.set(allocator, "_joint_avail_memo_epoch", None)
    tokens = _token_capacity(allocator, saved, config, family)
    for name, value in zip(("full", "swa"), tokens, strict=True):
        saved.set(allocator, f"_size_{name}", value)
        saved.set(allocator, f"_{name}_max_total_num_tokens", value)
    saved.set(kv, "size", pool.max_slots("full") - 1)
    saved.set(kv, "size_swa", pool.max_slots("swa") - 1)
    for side, part, capacity in zip((full, window), (kv.full_kv_pool, kv.swa_kv_pool), tokens, strict=True):
        spec = pool.spec(side.sub_pool_name)
        if hasattr(part, "_num_pages"):
            saved.set(part, "_num_pages", side.num_pages)
        saved.set(part, "size", _rows(side, spec, family.size_rule))
        if getattr(part, "host_capacity_tokens", None) is not None:
            saved.set(part, "host_capacity_tokens", capacity)
            saved.set(part, "host_capacity_bytes", capacity * spec.entry_bytes())


def _physical_page_size(side: Any) -> int:
    return int(getattr(side, "pool_page_size", side.page_size))


def _token_capacity(allocator: Any, saved: Saved, config: Any, family: Family) -> tuple[int, int]:
    if not family.shared_budget:
        return int(config.full_max_total_num_tokens), int(config.swa_max_total_num_tokens)
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
    saved.set(allocator, "_empty_shared_gap_bytes", full._current_gap_bytes())
    ids = len(full.free_virtual_ids) * allocator.page_size
    return full.available_size(), min(window.available_size(), ids)


def _rows(side: Any, spec: Any, rule: SizeRule) -> int:
    """What the sub-pool's ``size`` counts in this release."""
    if rule is SizeRule.SLOTS:
        return int(side.max_slots) - 1
    blocks = int(spec.blocks_per_page()) if rule is SizeRule.BLOCKS else 1
    page = _physical_page_size(side)
    return int(side.num_pages) * blocks * page - page
