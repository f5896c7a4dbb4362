"""A small hybrid pool whose pages carry patterns, for tests of the allocators."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import pytest
import torch
from kvarena.pool.layout import MHASubPoolSpec
from kvarena.pool.sizing import resize_for
from kvarena.pool.testing import make_driver, no_leaks
from kvarena.pool.unified_kv_pool import UnifiedKVPool
from kvarena.pool.unified_swa_allocator import UnifiedSWATokenToKVPoolAllocator

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["AllocatorFixtures", "HybridSample", "allocated", "capacities", "storage"]


@final
class HybridSample:
    """A pool of a few granules, and its allocator; the envelopes of an odd page size have odd sizes.

    Parameters
    ----------
    driver : Driver
        Its granularity scales the pages, so that a granule holds about 9 and 30 of them.
    page_size : int
        Tokens a page.
    reserved : bool
        Whether the pool is sized after capture.
    total : int, optional
        Bytes; 8 granules by default.
    swapped : bool
        Let the full side grow down and the window up.
    wide_window : bool
        Make the window's pages the larger ones.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        page_size: int = 4,
        reserved: bool,
        total: int | None = None,
        swapped: bool = False,
        wide_window: bool = False,
    ) -> None:
        scale = driver.granularity // 4096
        heads = 12 * scale // page_size | 1  # odd, so that envelopes are if the page size is
        layers = (1, 3) if wide_window else (3, 1)
        directions = ("down", "up") if swapped else ("up", "down")
        specs = [
            MHASubPoolSpec(name, direction, layer, heads, 3, torch.uint8, v_head_dim=8)  # type: ignore[arg-type]
            for name, direction, layer in zip(("full", "swa"), directions, layers, strict=True)
        ]
        self.driver = driver
        self.page_size = page_size
        self.reserved_bytes = total or 8 * driver.granularity
        self.pool = UnifiedKVPool(
            total_bytes=self.reserved_bytes,
            sub_pool_specs=specs,
            driver=driver,
            page_size=page_size,
            post_capture_active=reserved,
        )
        self.allocator = UnifiedSWATokenToKVPoolAllocator(self.pool)
        self._stamps = torch.zeros(self.pool.reserved_num_pages("full"), dtype=torch.int64)
        self._next_stamp = 1

    def __enter__(self) -> HybridSample:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.close()

    def finalize(self, total: int) -> None:
        """Finalize the pool and resize the allocator."""
        config = resize_for(self.pool, total)
        self.pool.finalize_backing(config)
        self.allocator.resize(config)

    def write(self, ids: torch.Tensor) -> None:
        """Fill the pages of tokens, on each side that has one, with their own pattern, through the views."""
        pages = self._pages(ids)
        self._stamps[pages] = self._next_stamp + torch.arange(len(pages))
        self._next_stamp += len(pages)
        for _, view, physical, expected in self._parts(pages):
            view[physical] = expected

    def check(self, ids: torch.Tensor) -> None:
        """The pages still read what was written, on each side that has one, and the sink reads zero."""
        for where, view, physical, expected in self._parts(self._pages(ids)):
            assert torch.equal(view[physical], expected), f"{where} reads wrong bytes"
        assert not self.pool.raw[: self.pool.sink_bytes].any(), "the sink was written to"

    def _pages(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:: self.page_size] // self.page_size

    def _parts(self, pages: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each side, layer and part: its view, the physical pages, and what they should read."""
        for name, side in (("full", self.allocator.full), ("swa", self.allocator.swa)):
            physical = side.page_table(pages)
            here = physical > 0
            stamps = self._stamps[pages[here]] * 31
            for layer in range(self.pool.spec(name).layer_num):
                for part, view in (
                    ("k", self.pool.k_view(name, layer)),
                    ("v", self.pool.v_view(name, layer)),
                ):
                    inner = torch.arange(view[0].numel()) * 5 + layer * 7 + ord(part)
                    expected = ((stamps[:, None] + inner) % 251).to(torch.uint8).view(-1, *view.shape[1:])
                    yield (
                        f"{name}, layer {layer}, {part}",
                        view,
                        physical[here].to(view.device),
                        expected.to(view.device),
                    )


class AllocatorFixtures:
    """What the contracts of the allocators stand on."""

    expression: str
    """How to make the driver: a dotted name and a call."""

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        """A driver of which nothing may be left over, after a life that pays for what comes only once."""
        driver = make_driver(self.expression)
        with HybridSample(driver, reserved=False) as sample:
            assert sample.allocator.alloc(sample.page_size) is not None
        with no_leaks():
            yield driver

    @pytest.fixture
    def sample(self, driver: Driver) -> Iterator[HybridSample]:
        """An eager pool of pages of 4 tokens."""
        with HybridSample(driver, page_size=4, reserved=False) as sample:
            yield sample


def allocated(allocator: UnifiedSWATokenToKVPoolAllocator, tokens: int) -> torch.Tensor:
    """Ids of so many tokens, which must fit."""
    ids = allocator.alloc(tokens)
    assert ids is not None
    return ids


def capacities(sample: HybridSample) -> dict[str, Any]:
    """Every capacity that the pool, its sub-pools and the allocators expose."""
    pool, allocator = sample.pool, sample.allocator
    found: dict[str, Any] = {
        "total_bytes": pool.total_bytes,
        "sink_bytes": pool.sink_bytes,
        "active_allocation_bytes": pool.active_allocation_bytes,
        "buf_lens": pool.get_contiguous_buf_infos().lens,
        "item_lens": pool.get_contiguous_buf_infos().item_lens,
    }
    for name in ("size", "size_full", "size_swa", "max_slots"):
        found[name] = getattr(allocator, name)
    for name in ("available_size", "full_available_size", "swa_available_size"):
        found[name] = getattr(allocator, name)()
    for side in (allocator.full, allocator.swa):
        name = side.sub_pool_name
        for what in ("num_pages", "max_slots", "min_page_index", "min_slot_index"):
            found[f"pool {name} {what}"] = getattr(pool, what)(name)
            found[f"{name} {what}"] = getattr(side, what)
        for what in ("size", "num_virtual_ids", "page_size", "page_bytes", "entry_bytes"):
            found[f"{name} {what}"] = getattr(side, what)
        found[f"{name} available_size"] = side.available_size()
    return found


def storage(sample: HybridSample) -> tuple[int, ...]:
    """Addresses that captured graphs hold: the raw bytes, every view, every table."""
    pool, allocator = sample.pool, sample.allocator
    views = [
        getattr(pool, part)(spec.name, layer).data_ptr()
        for spec in pool.sub_pool_specs
        for layer in range(spec.layer_num)
        for part in ("k_view", "v_view")
    ]
    tables = [
        table.data_ptr()
        for side in (allocator.full, allocator.swa)
        for table in (side.virtual_to_physical, side.physical_to_virtual)
    ]
    return (pool.raw.data_ptr(), *views, *tables)
