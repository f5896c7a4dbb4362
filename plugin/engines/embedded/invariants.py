"""What must hold between capture and close, checked on a running engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarena.plugin.engines.embedded.config import FULL, WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvarena.plugin.engines.embedded.attention import PagedKV
    from kvarena.pool import UnifiedKVPool, UnifiedSWATokenToKVPoolAllocator
    from kvarena.transfer import RegistrationLedger

__all__ = ["addresses", "capacities", "moved", "registered_beyond_backed"]


def addresses(
    pool: UnifiedKVPool, allocator: UnifiedSWATokenToKVPoolAllocator, kv: PagedKV
) -> dict[str, int]:
    """Every address that a captured step may hold."""
    found = {"arena": pool.arena.base, "raw": pool.raw.data_ptr()}
    for index, view in enumerate(kv.views()):
        found[f"view {index}"] = view.data_ptr()
    for name, end in ((FULL, allocator.full_attn_allocator), (WINDOW, allocator.swa_attn_allocator)):
        found[f"{name} v2p"] = end.virtual_to_physical.data_ptr()
        found[f"{name} p2v"] = end.physical_to_virtual.data_ptr()
    return found


def moved(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Invariant 1: addresses never move. Names those that did."""
    return [
        f"{name} moved from {address:#x} to {after[name]:#x}"
        for name, address in before.items()
        if after[name] != address
    ]


def registered_beyond_backed(pool: UnifiedKVPool, ledgers: Iterable[RegistrationLedger]) -> list[str]:
    """Invariant 2: registered is within backed. Names the regions that are not."""
    base, end = pool.arena.base, pool.arena.base + pool.arena.backed_bytes
    return [
        f"{ledger.engine.name} has registered [{region.address:#x}, {region.end:#x}), "
        f"memory is at [{base:#x}, {end:#x})"
        for ledger in ledgers
        for region in ledger.regions
        if region.address < base or region.end > end
    ]


def capacities(pool: UnifiedKVPool, allocator: UnifiedSWATokenToKVPoolAllocator) -> dict[str, int]:
    """Invariant 4: every capacity that an idle pool and its allocators expose, for comparison."""
    found = {
        "total_bytes": pool.total_bytes,
        "active_allocation_bytes": pool.active_allocation_bytes,
        "size": allocator.size,
        "size_full": allocator.size_full,
        "size_swa": allocator.size_swa,
        "available_size": allocator.available_size(),
        "full_available_size": allocator.full_available_size(),
        "swa_available_size": allocator.swa_available_size(),
    }
    for name, end in ((FULL, allocator.full_attn_allocator), (WINDOW, allocator.swa_attn_allocator)):
        found |= {
            f"{name}.num_pages": pool.num_pages(name),
            f"{name}.max_slots": pool.max_slots(name),
            f"{name}.min_page_index": pool.min_page_index(name),
            f"{name}.min_slot_index": pool.min_slot_index(name),
            f"{name}.allocator.max_slots": end.max_slots,
            f"{name}.allocator.available_size": end.available_size(),
        }
    for index, nbytes in enumerate(pool.get_contiguous_buf_infos().lens):
        found[f"buffer {index}"] = nbytes
    return found
