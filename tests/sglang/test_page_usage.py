"""Free pages inside SGLang: what each side's allocator then really gives, and not a page more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvarena.plugin.engines.sglang.page_usage import SglangPageUsage

pytestmark = pytest.mark.sglang


def filled(rig: Any, page_size: int, lazy: bool, steps: str) -> Any:
    """A resized pool after some requests: ``a`` allocates on both sides, ``w`` and ``f`` free old ones."""
    bundle = rig.reserved(256, 128, page_size=page_size, lazy=lazy)
    bundle.resize(rig.config(160, 96))
    allocator, held = bundle.allocator, []
    for step in steps:
        if step == "a":
            got = allocator.alloc(4 * page_size)
            if got is not None:
                held.append(got)
        elif step == "w" and held:
            allocator.free_swa(held[len(held) // 2])
        elif step == "f" and held:
            allocator.free(held.pop(0))
    return bundle


def could_get_full(bundle: Any) -> int:
    """Pages that the full side gives until it refuses."""
    full, pages = bundle.sides[0], 0
    while full.alloc(full.page_size) is not None:
        pages += 1
    return pages


def could_get_window(bundle: Any) -> int:
    """Pages that the window side binds until it refuses; as in SGLang, the full side is flushed for them."""
    full, window = bundle.sides
    flush = getattr(full, "flush_for_allocation", None) or (lambda: full._flush(urgent=True))
    unbound = [
        page
        for page in range(full.min_page_index, window.num_virtual_ids)
        if int(window.virtual_to_physical[page]) < 0
    ]
    for pages, page in enumerate(unbound):
        if window.available_size() < window.page_size:
            flush()
        try:
            window.alloc_with_virtual(torch.tensor([page]))
        except AssertionError:
            return pages  # out of physical room
        if overlap(full, window):
            return pages  # without lazy compaction, SGLang checks that before, for both sides at once
    return len(unbound)


def overlap(*sides: Any) -> bool:
    """Whether the two sides have bytes in common."""
    low, high = sorted(sides, key=lambda side: side.grow_direction != "up")
    return bool(low._byte_high_frontier() > high._byte_low_frontier())


STEPS = {
    "empty": "",
    "a few": "aaa",
    "many": "aaaaaaaa",
    "windows freed": "aaaaww",
    "requests ended": "aaaaaafaf",
    "full": "a" * 99,
    "full, then freed": "a" * 99 + "wfw",
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_free_pages_are_what_an_allocation_could_get_now(
    rig: Any, page_size: int, lazy: bool, steps: str
) -> None:
    for side, could_get in (("full", could_get_full), ("swa", could_get_window)):
        bundle = filled(rig, page_size, lazy, steps)
        usage = SglangPageUsage(bundle.allocator).page_usage()
        assert could_get(bundle) == usage[side].free, side
        bundle.bound.close()


def test_bytes_that_the_neighbour_borrowed_are_not_free(rig: Any) -> None:
    """They are all counted where pages in use alone are looked at."""
    bundle = filled(rig, 4, lazy=False, steps="a" * 8)
    usage = SglangPageUsage(bundle.allocator).page_usage()
    unused = [side.num_pages - side.min_page_index - usage[side.sub_pool_name].live for side in bundle.sides]
    free = [usage[side.sub_pool_name].free for side in bundle.sides]
    assert free == [4, 3]
    assert unused[0] > 2 * free[0]
    assert unused[1] > 2 * free[1]


def test_asking_leaves_what_sglang_remembers_alone(rig: Any) -> None:
    bundle = filled(rig, 4, lazy=True, steps="aaaaww")
    kept = [
        {name: value for name, value in vars(side).items() if "memo" in name or "epoch" in name}
        for side in (*bundle.sides, bundle.allocator)
    ]
    SglangPageUsage(bundle.allocator).page_usage()
    assert kept == [
        {name: value for name, value in vars(side).items() if "memo" in name or "epoch" in name}
        for side in (*bundle.sides, bundle.allocator)
    ]
