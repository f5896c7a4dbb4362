"""Pages of an aborted transfer do not move while its sender may still write them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvarena.plugin.engines.sglang.families.shapes import resolve

pytestmark = pytest.mark.sglang


@pytest.fixture
def gate_path(sglang: Any) -> str:
    """Where SGLang makes its gate."""
    if sglang.number < 20:
        pytest.skip("PD with such a pool is refused before 0.5.20")
    return "sglang.srt.disaggregation.utils.unified_memory_disagg_move_gate"


def scheduler_of(role: str, allocator: Any) -> Any:
    """As much of SGLang's scheduler as a gate looks at, with SGLang's own queue of transfers."""
    queue = object.__new__(resolve("sglang.srt.disaggregation.decode.DecodeTransferQueue"))
    queue.queue = []
    queue._deferred_releases = []
    scheduler = SimpleNamespace(
        disaggregation_mode=resolve("sglang.srt.disaggregation.utils.DisaggregationMode")(role),
        token_to_kv_pool_allocator=allocator,
        decode_offload_manager=None,
        disagg_decode_prealloc_queue=SimpleNamespace(has_published_destinations=False),
        disagg_prefill_inflight_queue=[],
        disagg_prefill_pending_chunk_rids=set(),
    )
    if role == "decode":
        scheduler.disagg_decode_transfer_queue = queue
    return scheduler


def test_a_deferred_release_keeps_pages_where_they_are(rig: Any, gate_path: str) -> None:
    bundle = rig.reserved(64, 32, lazy=True)
    scheduler = scheduler_of("decode", bundle.allocator)
    make = resolve(gate_path)
    ours, stocks = make(scheduler), make.__wrapped__(scheduler)
    assert ours() is stocks() is True
    scheduler.disagg_decode_transfer_queue._deferred_releases.append(("request", 0.0, 0, 1))
    assert stocks() is True  # SGLang says that pages may move: a peer may still write them
    assert ours() is False
    scheduler.disagg_decode_transfer_queue._deferred_releases.clear()
    assert ours() is True


def test_what_sglang_forbids_stays_forbidden(rig: Any, gate_path: str) -> None:
    bundle = rig.reserved(64, 32, lazy=True)
    decode = scheduler_of("decode", bundle.allocator)
    decode.disagg_decode_transfer_queue.queue.append("request")
    assert resolve(gate_path)(decode)() is False
    prefill = scheduler_of("prefill", bundle.allocator)
    gate = resolve(gate_path)(prefill)
    assert gate() is True
    prefill.disagg_prefill_inflight_queue.append("request")
    assert gate() is False


def test_a_closed_gate_keeps_holes_from_counting_as_free(rig: Any, gate_path: str) -> None:
    """Installed as the scheduler does it; compaction of the neighbour is what the holes would need."""
    from kvarena.plugin.engines.sglang.page_usage import SglangPageUsage

    bundle = rig.reserved(256, 128, lazy=True)
    bundle.resize(rig.config(160, 96))
    scheduler = scheduler_of("decode", bundle.allocator)
    bundle.allocator.set_disagg_move_gate(resolve(gate_path)(scheduler))
    held = [bundle.allocator.alloc(16) for _ in range(8)]
    bundle.allocator.free(held[0])
    usage = SglangPageUsage(bundle.allocator)
    before = usage.page_usage()
    scheduler.disagg_decode_transfer_queue._deferred_releases.append(("request", 0.0, 0, 1))
    after = usage.page_usage()
    assert all(after[side].live == before[side].live for side in before)
    assert all(after[side].free <= before[side].free for side in before)


def test_stocks_own_pool_keeps_stocks_gate(rig: Any, gate_path: str) -> None:
    scheduler = scheduler_of("decode", rig.eager(64, 32, lazy=True).allocator)
    gate = resolve(gate_path)(scheduler)
    scheduler.disagg_decode_transfer_queue._deferred_releases.append(("request", 0.0, 0, 1))
    assert gate() is True
