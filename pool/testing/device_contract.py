"""What work on a device sees of a pool that changes: a pytest class to derive from, for any driver.

On a GPU the work is captured graphs and streams of its own. On the host, where
both have nothing to stand for, the same tests run step by step, so that none
of their lines is run on a GPU for the first time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, final

import pytest
import torch
from kvarena.pool.errors import DriverError
from kvarena.pool.layout import MHASubPoolSpec
from kvarena.pool.testing import make_driver
from kvarena.pool.testing.allocator_samples import HybridSample, allocated
from kvarena.pool.unified_kv_pool import UnifiedKVPool

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["DeviceContract", "DeviceWork"]

MIB = 1 << 20
SPECS = (
    MHASubPoolSpec("full", "up", 4, 4, 64, torch.bfloat16),
    MHASubPoolSpec("swa", "down", 4, 4, 64, torch.bfloat16),
)


@final
class DeviceWork:
    """Ways to run work on a driver's device, and what stands for them on the host."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.device = driver.device
        self.on_gpu = driver.device.type == "cuda"

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """Capture a step as a graph; what replays it, and the tensor that each replay fills anew."""
        if not self.on_gpu:
            seen = step().clone()
            return lambda: seen.copy_(step()), seen
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm up beside the default stream, as capture wants it
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = step()
        return graph.replay, seen

    def later(self, step: Callable[[], object]) -> None:
        """Run a step on a stream of its own, about a tenth of a second from now; on the host at once."""
        if not self.on_gpu:
            time.sleep(0)
            step()
            return
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            step()

    def synchronize(self) -> None:
        """Wait for all work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    @contextmanager
    def nothing_waits(self) -> Iterator[None]:
        """Fail if the block waits for the device."""
        self.synchronize()
        self._sync_debug_mode("error")
        try:
            yield
        finally:
            self._sync_debug_mode("default")

    def _sync_debug_mode(self, mode: str) -> None:
        if self.on_gpu:
            with warnings.catch_warnings():
                # torch warns that the mode is a prototype whenever it is set.
                warnings.simplefilter("ignore", UserWarning)
                torch.cuda.set_sync_debug_mode(mode)


class DeviceContract:
    """Graphs and streams over memory that is swapped, grown, moved and released beneath them."""

    expression: str
    """How to make the driver: a dotted name and a call."""

    @pytest.fixture
    def work(self) -> DeviceWork:
        """A driver of its own for each test."""
        return DeviceWork(make_driver(self.expression))

    def test_a_graph_captured_on_the_sink_replays_into_the_final_memory(self, work: DeviceWork) -> None:
        pool = _pool(work.driver, 64 * MIB)
        keys = pool.k_view("full", 2)
        page = torch.zeros(1, dtype=torch.int64, device=work.device)
        new = torch.ones(1, 16, 4, 64, dtype=torch.bfloat16, device=work.device)
        replay, _ = work.capture(lambda: keys.index_copy_(0, page, new)[:1])
        replay()
        pool.finalize_backing(SimpleNamespace(unified_memory_pool_bytes=32 * MIB))
        assert float(keys[:100].max()) == 0
        last = pool.num_pages("full") - 1
        for value, where in ((2.0, 0), (3.0, last)):
            new.fill_(value)
            page.fill_(where)
            replay()
            assert bool((keys[where] == value).all())
        pool.close()

    def test_finalize_waits_for_work_on_the_sink(self, work: DeviceWork) -> None:
        pool = _pool(work.driver, 64 * MIB)
        sink = pool.raw[: pool.sink_bytes]
        work.later(lambda: sink.fill_(9))
        pool.finalize_backing(SimpleNamespace(unified_memory_pool_bytes=16 * MIB))
        work.synchronize()
        assert int(sink.max()) == 0
        pool.close()

    def test_many_large_lives_leave_no_memory_taken(self, work: DeviceWork) -> None:
        size = 4 << 30 if work.on_gpu else 4 * MIB
        before = work.driver.free_bytes()
        for _ in range(20):
            pool = _pool(work.driver, 4 * size)
            pool.finalize_backing(SimpleNamespace(unified_memory_pool_bytes=size))
            pool.grow(2 * size)
            pool.close()
        # A GPU also loads kernels into its memory when they first run.
        assert before - work.driver.free_bytes() <= (256 * MIB if work.on_gpu else 0)

    def test_errors_name_the_call_and_its_code(self, work: DeviceWork) -> None:
        size = work.driver.granularity
        with pytest.raises(DriverError, match=r"failed with \w*INVAL") as caught:
            work.driver.unmap(size, size)
        assert caught.value.op == ("cuMemUnmap" if work.on_gpu else "mmap")

    def test_no_operation_of_an_allocator_waits_for_the_device(self, work: DeviceWork) -> None:
        with HybridSample(work.driver, page_size=4, reserved=True) as sample:
            sample.finalize(sample.reserved_bytes)
            allocator, page = sample.allocator, sample.page_size
            on_device = torch.arange(256, device=work.device)
            kept = allocated(allocator, 8 * page)
            sample.write(kept)
            with work.nothing_waits():
                ids = allocated(allocator, allocator.available_size())
                allocator.translate_kv_loc(on_device)
                allocator.translate_loc_from_full_to_swa(on_device)
                allocator.full.page_table(on_device)
                allocator.translate_kv_loc(ids)
                allocator.pin(ids[-page:])
                allocator.transfer_pages(ids, "full")
                allocator.free_swa(ids[: 4 * page])
                allocator.free_segment(ids[: 40 * page], start_pos=0)
                allocator.compact()
                allocator.unpin(ids[-page:])
                more = allocator.alloc(allocator.full_available_size(), swa_tail_len=0)
                assert more is not None
                allocator.free(more)
                assert allocator.full.moved_pages + allocator.swa.moved_pages > 0
            sample.check(kept)
            assert allocator.verify_byte_accounting() == []

    def test_a_captured_graph_reads_pages_wherever_they_are_moved(self, work: DeviceWork) -> None:
        with HybridSample(work.driver, page_size=4, reserved=True) as sample:
            allocator, page = sample.allocator, sample.page_size
            ids = torch.zeros(4, dtype=torch.int64, device=work.device)
            keys = sample.pool.k_view("full", 1)
            replay, seen = work.capture(lambda: keys[allocator.translate_kv_loc(ids) // page].clone())
            replay()
            assert not seen.any()  # the sink

            sample.finalize(sample.reserved_bytes // 2)
            first, last = allocated(allocator, 16 * page), allocated(allocator, 4 * page)
            sample.write(last)
            ids.copy_(last[::page])
            replay()
            before = seen.clone()
            assert before.any()
            where = allocator.transfer_pages(last, "full").tolist()
            allocator.free(first)
            assert allocator.compact() > 0
            assert allocator.transfer_pages(last, "full").tolist() != where
            replay()
            assert torch.equal(seen, before)


def _pool(driver: Driver, total_bytes: int) -> UnifiedKVPool:
    return UnifiedKVPool(
        total_bytes=total_bytes, sub_pool_specs=SPECS, driver=driver, page_size=16, post_capture_active=True
    )
