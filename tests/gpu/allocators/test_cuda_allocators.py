"""The allocators over CUDA's memory: what they do anywhere, and what only a GPU can show."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, settings
from kvarena.pool import CudaVmm
from kvarena.pool.testing.allocator_contract import AllocatorContract
from kvarena.pool.testing.allocator_ids_contract import AllocatorIdsContract
from kvarena.pool.testing.allocator_machine import AllocatorMachine
from kvarena.pool.testing.allocator_samples import HybridSample
from kvarena.pool.testing.resize_contract import ResizeContract

pytestmark = pytest.mark.gpu


class TestAllocators(AllocatorContract):
    expression = "kvarena.pool.CudaVmm(0)"


class TestIds(AllocatorIdsContract):
    expression = "kvarena.pool.CudaVmm(0)"


class TestResize(ResizeContract):
    expression = "kvarena.pool.CudaVmm(0)"


class CudaMachine(AllocatorMachine):
    expression = "kvarena.pool.CudaVmm(0)"


@pytest.mark.usefixtures("_device")
class TestCudaMachine(CudaMachine.TestCase):  # type: ignore[misc]
    settings = settings(
        max_examples=20,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@contextmanager
def nothing_synchronizes() -> Iterator[None]:
    torch.cuda.synchronize()
    _sync_debug_mode("error")
    try:
        yield
    finally:
        _sync_debug_mode("default")


def _sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        # torch warns that the mode is a prototype whenever it is set.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def test_no_operation_waits_for_the_device() -> None:
    with HybridSample(CudaVmm(0), page_size=4, reserved=True) as sample:
        sample.finalize(sample.reserved_bytes)
        allocator, page = sample.allocator, sample.page_size
        on_device = torch.arange(256, device="cuda")
        kept = allocator.alloc(8 * page)
        assert kept is not None
        sample.write(kept)
        with nothing_synchronizes():
            ids = allocator.alloc(allocator.available_size())
            assert ids is not None
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


def test_a_captured_graph_reads_pages_wherever_they_are_moved() -> None:
    with HybridSample(CudaVmm(0), page_size=4, reserved=True) as sample:
        allocator, page = sample.allocator, sample.page_size
        ids = torch.zeros(4, dtype=torch.int64, device="cuda")
        keys = sample.pool.k_view("full", 1)

        def read() -> torch.Tensor:
            return keys[allocator.translate_kv_loc(ids) // page].clone()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            read()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = read()
        graph.replay()
        assert not seen.any()  # the sink

        sample.finalize(sample.reserved_bytes // 2)
        first = allocator.alloc(16 * page)
        last = allocator.alloc(4 * page)
        assert first is not None
        assert last is not None
        sample.write(last)
        ids.copy_(last[::page])
        graph.replay()
        before = seen.clone()
        assert before.any()
        where = allocator.transfer_pages(last, "full").tolist()
        allocator.free(first)
        assert allocator.compact() > 0
        assert allocator.transfer_pages(last, "full").tolist() != where
        graph.replay()
        assert torch.equal(seen, before)
