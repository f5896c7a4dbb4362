"""The hybrid allocator against a plain model, as a hypothesis state machine over any driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvarena.pool.errors import AllocatorError, ArenaStateError, PoolSizeError
from kvarena.pool.testing import make_driver
from kvarena.pool.testing.allocator_samples import HybridSample, capacities, storage

__all__ = ["AllocatorMachine"]


class AllocatorMachine(RuleBasedStateMachine):
    """What callers may do in any order, between reserve and close.

    The model is a set of virtual pages with their pins, and which of them
    have a window page. Every live page carries a pattern of its own, on both
    sides; after each step all of them are read back through the views, the
    books must add up, and no address may have moved.
    """

    expression: str
    """How to make the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.window: dict[int, bool] = {}
        self.pins: Counter[int] = Counter()
        self.group: set[int] | None = None

    @initialize(
        page_size=st.sampled_from([1, 3, 4]),
        swapped=st.booleans(),
        eighths=st.integers(3, 8),
        odd=st.integers(0, 200),
    )
    def finalize(self, page_size: int, swapped: bool, eighths: int, odd: int) -> None:
        self.sample = HybridSample(
            make_driver(self.expression), page_size=page_size, swapped=swapped, reserved=True
        )
        self.allocator = self.sample.allocator
        self.storage = storage(self.sample)
        self.sample.finalize(self.sample.reserved_bytes * eighths // 8 - odd)

    def teardown(self) -> None:
        if hasattr(self, "sample"):
            self.sample.pool.close()

    @rule(share=st.integers(0, 24), tail=st.none() | st.integers(0, 24))
    def allocate(self, share: int, tail: int | None) -> None:
        page = self.sample.page_size
        available = self.allocator.available_size() // page
        # Mostly a part of what is there; sometimes all of it, or a page more.
        count = available + share - 22 if share > 21 else available * share // 64
        count = max(0, count)
        if tail is None:
            ids = self.allocator.alloc(count * page)
            assert (ids is not None) == (count <= available)
            window = count
        else:
            window = min(tail, count)
            ids = self.allocator.alloc(count * page, swa_tail_len=window * page)
            assert ids is not None or count > available
        if ids is not None:
            pages = (ids[::page] // page).tolist()
            assert not self.window.keys() & set(pages)
            self.window.update((each, place >= count - window) for place, each in enumerate(pages))
            self.sample.write(ids)

    @rule(data=st.data(), path=st.sampled_from(["free", "free_segment", "free_full"]))
    def free(self, data: st.DataObject, path: str) -> None:
        pages = self._draw(data)
        ids = self._ids(pages)
        wrong = any(self.pins[page] for page in pages)
        if path == "free_full":
            wrong = wrong or any(self.window[page] for page in pages)
        if path == "free":
            ids = ids.flip(0)  # in any order
        calls: dict[str, Callable[[torch.Tensor], None]] = {
            "free": self.allocator.free,
            "free_full": self.allocator.free_full,
            "free_segment": partial(self.allocator.free_segment, start_pos=0),
        }
        call = calls[path]
        if wrong:
            self._refused(call, ids)
        else:
            call(ids)
            if self.group is None:
                self._forget(pages)
            else:
                self.group.update(pages)

    @rule(data=st.data(), segment=st.booleans())
    def free_window(self, data: st.DataObject, segment: bool) -> None:
        page = self.sample.page_size
        pages = self._draw(data)
        ids = self._ids(pages)
        if not segment and len(ids):
            # Any of a page's tokens stands for all of it, and repeats are nothing new.
            picks = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=8))
            ids = ids[picks]
            pages = sorted(set((ids // page).tolist()))
        if any(self.window[each] and self.pins[each] for each in pages):
            self._refused(self.allocator.free_swa, ids)
            return
        if segment:
            self.allocator.free_swa_segment(ids, start_pos=0)
        else:
            self.allocator.free_swa(ids)
        self.window.update((each, False) for each in pages)

    @rule()
    def open_or_end_a_group(self) -> None:
        if self.group is None:
            self.allocator.free_group_begin()
            self.group = set()
        elif any(self.pins[page] for page in self.group):
            before = capacities(self.sample)
            with pytest.raises(AllocatorError, match="pinned"):
                self.allocator.free_group_end()
            assert capacities(self.sample) == before
        else:
            self.allocator.free_group_end()
            self._forget(sorted(self.group))
            self.group = None

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pages = self._draw(data)
        self.allocator.pin(self._ids(pages))
        self.pins.update(pages)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pages = self._draw(data)
        if all(self.pins[page] for page in pages):
            self.allocator.unpin(self._ids(pages))
            self.pins.subtract(pages)
        else:
            self._refused(self.allocator.unpin, self._ids(pages))

    @rule(data=st.data(), wrong=st.sampled_from(["free", "beyond", "negative"]))
    def ask_for_what_cannot_be(self, data: st.DataObject, wrong: str) -> None:
        bad = {"free": self._free_id(), "beyond": 1 << 30, "negative": -5}[wrong]
        if bad is not None:
            ids = torch.cat([self._ids(self._draw(data)), torch.tensor([bad])])
            for call in (self.allocator.free, self.allocator.free_full, self.allocator.pin):
                self._refused(call, ids)

    @rule()
    def compact(self) -> None:
        available = self.allocator.available_size()
        self.allocator.compact()
        assert self.allocator.available_size() == available

    @rule(eighths=st.integers(1, 8), odd=st.integers(0, 200))
    def grow_or_shrink(self, eighths: int, odd: int) -> None:
        pool, total = self.sample.pool, self.sample.reserved_bytes * eighths // 8 - odd
        if total > pool.total_bytes:
            pool.grow(total)
            self.allocator.grow()
            return
        before = capacities(self.sample)
        try:
            self.allocator.shrink(total)
        except (AllocatorError, PoolSizeError) as refused:
            pinned = isinstance(refused, AllocatorError) and any(self.pins.values())
            too_small = isinstance(refused, PoolSizeError) and refused.minimum > total
            if not (pinned or too_small):
                raise
            assert capacities(self.sample) == before
            return
        if total < pool.total_bytes:
            try:
                pool.shrink(total)
            except ArenaStateError:  # inside a handle: then all stays
                self.allocator.grow()

    @precondition(lambda self: len(self.window) > 8)
    @rule()
    def clear(self) -> None:
        if any(self.pins.values()):
            before = capacities(self.sample)
            with pytest.raises(AllocatorError, match="pinned"):
                self.allocator.clear()
            assert capacities(self.sample) == before
        else:
            self.allocator.clear()
            self.window.clear()
            self.group = None
            assert self.allocator.full_available_size() == self.allocator.size_full
            assert self.allocator.swa_available_size() == self.allocator.size_swa

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "sample"):
            return
        allocator, page = self.allocator, self.sample.page_size
        assert allocator.verify_byte_accounting() == []
        assert storage(self.sample) == self.storage
        assert allocator.full.allocated_count() == len(self.window) * page
        assert allocator.swa.allocated_count() == sum(self.window.values()) * page
        assert 0 <= allocator.available_size() <= allocator.full_available_size() <= allocator.size_full
        assert allocator.swa_available_size() <= allocator.size_swa
        for bound in (allocator.max_slots, allocator.full.max_slots, allocator.swa.max_slots):
            assert all((each + 1) * page <= bound for each in self.window)
        self.sample.check(self._ids(sorted(self.window)))
        windowed = self._ids([each for each, has in self.window.items() if has])
        tombstones = self._ids([each for each, has in self.window.items() if not has])
        device = self.sample.pool.device
        assert (allocator.translate_loc_from_full_to_swa(windowed.to(device)) > 0).all()
        assert not allocator.translate_loc_from_full_to_swa(tombstones.to(device)).any()

    def _draw(self, data: st.DataObject) -> list[int]:
        """A few live pages that no open group is about to free."""
        pages = [each for each in self.window if self.group is None or each not in self.group]
        if not pages:
            return []
        # A run of neighbours by age: what a request would hold.
        start = data.draw(st.integers(0, len(pages) - 1))
        stride = data.draw(st.integers(1, 3))
        return pages[start::stride][: data.draw(st.integers(1, 12))]

    def _ids(self, pages: list[int]) -> torch.Tensor:
        size = self.sample.page_size
        return (torch.tensor(pages, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()

    def _free_id(self) -> int | None:
        first, last = self.sample.pool.min_page_index("full"), self.allocator.full.num_virtual_ids
        free = next((page for page in range(first, last) if page not in self.window), None)
        return None if free is None else free * self.sample.page_size

    def _forget(self, pages: list[int]) -> None:
        for page in pages:
            del self.window[page]

    def _refused(self, call: Any, ids: torch.Tensor) -> None:
        before = capacities(self.sample)
        with pytest.raises(AllocatorError):
            call(ids)
        assert capacities(self.sample) == before
