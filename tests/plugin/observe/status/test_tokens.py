"""Tokens are those of attention; states are counted in requests (vllm#40384)."""

from __future__ import annotations

from pathlib import Path

import torch
from kvarena.plugin.commands.status.view import render
from kvarena.plugin.config import Settings
from kvarena.plugin.lifecycle import PoolLifecycle
from kvarena.plugin.observe.metrics import make_registry
from kvarena.plugin.observe.status.usage import AllocatorUsage
from kvarena.pool import (
    MambaSubPoolSpec,
    MHASubPoolSpec,
    MLASubPoolSpec,
    MultiEndedAllocator,
    PoolCost,
    PostCaptureKVResize,
    SubPoolCost,
    resize_for,
    tokens_for_budget,
)
from rich.console import Console

# granite-4.0-h-tiny: 4 attention layers of 4 heads, 36 Mamba layers with a float32 recurrent state.
ATTENTION = MHASubPoolSpec("full", "up", 4, 4, 128, torch.bfloat16)
STATES = MambaSubPoolSpec(
    "mamba", "down", 36, conv_shapes=((3328, 3),), temporal_shape=(48, 64, 128), conv_dtype=torch.bfloat16
)
STATE_BYTES, TOKEN_BYTES = 57_341_952, 8192


class _Resizes:
    """The allocators of a pool with states, as an engine's composite."""

    def __init__(self, full: MultiEndedAllocator, states: MultiEndedAllocator) -> None:
        self.sides = [full, states]

    def resize(self, config: PostCaptureKVResize) -> None:
        for side in self.sides:
            side._set_capacity(side.pool.max_slots(side.sub_pool_name))

    def revert_resize(self) -> None:
        raise AssertionError("nothing failed")


def _tokens(total_bytes: int, requests: int) -> int:
    states = SubPoolCost("mamba", STATES.entry_bytes(), ratio=0, fixed_slots=requests)
    attention = SubPoolCost("full", ATTENTION.entry_bytes())
    return tokens_for_budget(PoolCost((attention, states)), total_bytes)


def test_sixteen_requests_in_eight_gib() -> None:
    assert (ATTENTION.entry_bytes(), STATES.entry_bytes()) == (TOKEN_BYTES, STATE_BYTES)
    tokens = _tokens(8 << 30, 16)
    left = (8 << 30) - 17 * STATE_BYTES  # 16 states, and the sink
    assert left // TOKEN_BYTES - tokens in range(STATE_BYTES // TOKEN_BYTES + 2)  # states begin at multiples
    # Not a half, nor a quarter, of it.
    assert tokens > 0.98 * left / TOKEN_BYTES


def test_a_few_states_do_not_cut_the_tokens() -> None:
    # Neither side is called "full", and nobody says for how many requests.
    specs = (
        MambaSubPoolSpec("states", "up", 1, ((4, 4),), (32, 32), torch.bfloat16),
        MLASubPoolSpec("latent", "down", 1, 24, 8, torch.bfloat16),
    )
    lifecycle = PoolLifecycle(Settings(status=False, load_plugins=False), device="cpu")
    pool = lifecycle.reserve(specs, total_bytes=1 << 20, page_size=4)
    try:
        sides = _Resizes(*(MultiEndedAllocator(pool, name) for name in ("latent", "states")))
        lifecycle.finalize(resize_for(pool, 1 << 20), sides)
        status = lifecycle.reporter.pool_status()
        # 256 bytes a page behind a sink of one state, 4128 bytes.
        assert status.tokens == ((1 << 20) // 256 - 17) * 4
        assert status.requests == (1 << 20) // 4128 - 1
    finally:
        lifecycle.close()


def test_status_gauge_and_allocator_agree_to_the_token(directory: Path) -> None:
    requests, total = 2, 5 * STATE_BYTES
    lifecycle = PoolLifecycle(
        Settings(socket_dir=str(directory), load_plugins=False, memory_limit=1 << 30), device="cpu"
    )
    try:
        pool = lifecycle.reserve((ATTENTION, STATES), total_bytes=total, page_size=1)
        sides = _Resizes(MultiEndedAllocator(pool, "full"), MultiEndedAllocator(pool, "mamba"))
        sides.sides[0].bind_peer(sides.sides[1])
        tokens = _tokens(total, requests)
        resize = PostCaptureKVResize(
            max_total_num_tokens=tokens,
            unified_memory_pool_bytes=total,
            capped_max_running_requests=requests,
        )
        lifecycle.finalize(resize, sides)
        assert sides.sides[1].alloc(requests) is not None
        allocatable = sides.sides[0].available_size()

        status = lifecycle.reporter.pool_status()
        registry = make_registry(lifecycle.reporter)
        labels = {"role": "", "model": "", "rank": "", "pool": lifecycle.reporter.name}
        gauge = registry.get_sample_value("kvarena_capacity_tokens", labels)
        assert allocatable == tokens == status.tokens == gauge
        assert status.requests == registry.get_sample_value("kvarena_capacity_requests", labels) == requests
        assert [(each.name, each.unit) for each in status.sub_pools] == [
            ("full", "tokens"),
            ("mamba", "requests"),
        ]
        assert lifecycle.reporter._source is not None
        assert isinstance(lifecycle.reporter._source, AllocatorUsage)
        lifecycle.reporter.record()
        console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        from kvarena.plugin.observe.status.files import Found

        console.print(render([Found(directory, "running", lifecycle.reporter.status())], directory))
        assert f"{tokens:,} tokens, states of 2 requests" in console.export_text()
        console.file.close()
    finally:
        lifecycle.close()
