from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kvarena.pool import (
    HostVmm,
    MambaSubPoolSpec,
    MHASubPoolSpec,
    MLASubPoolSpec,
    PoolSizeError,
    PostCaptureKVResize,
    UnifiedKVPool,
    UnifiedSWATokenToKVPoolAllocator,
    resize_for,
    smaller_resize,
)

LIMIT = 1 << 20


@pytest.fixture
def pool() -> Iterator[UnifiedKVPool]:
    specs = [
        MHASubPoolSpec("full", "up", 3, 2, 8, torch.float16),
        MHASubPoolSpec("swa", "down", 1, 2, 8, torch.float16),
    ]
    pool = UnifiedKVPool(
        total_bytes=4 * LIMIT,
        sub_pool_specs=specs,
        driver=HostVmm(memory_limit=LIMIT),
        page_size=4,
        post_capture_active=True,
        bs1_floor_terms=[("full", 64), ("swa", 32)],
    )
    yield pool
    pool.close()


def test_the_sizes_are_what_the_allocators_have(pool: UnifiedKVPool) -> None:
    resize = resize_for(pool, LIMIT // 2)
    allocator = UnifiedSWATokenToKVPoolAllocator(pool)
    pool.finalize_backing(resize)
    allocator.resize(resize)
    assert resize.full_max_total_num_tokens == resize.max_total_num_tokens == allocator.size_full
    assert resize.swa_max_total_num_tokens == allocator.size_swa
    assert resize.unified_memory_pool_bytes == pool.total_bytes
    assert resize.capped_max_running_requests is None


@pytest.mark.parametrize("ends", [("up", "down"), ("down", "up")])
@pytest.mark.parametrize("name", ["full", "latent"])
def test_states_are_no_tokens(ends: tuple[Any, Any], name: str) -> None:
    # vllm-project/vllm#40384: what the end that grows up holds was called tokens, states or not.
    specs = [
        MLASubPoolSpec(name, ends[0], 2, 24, 8, torch.float16),
        MambaSubPoolSpec("mamba", ends[1], 2, ((3, 5),), (64, 64), torch.float16),
    ]
    pool = UnifiedKVPool(
        total_bytes=LIMIT, sub_pool_specs=specs, driver=HostVmm(), page_size=4, post_capture_active=True
    )
    # Pages of 512 bytes behind a sink of one state.
    minimum = -(-specs[1].entry_bytes() // 512)
    resize = resize_for(pool, LIMIT // 2)
    assert resize.max_total_num_tokens == (LIMIT // 2 // 512 - minimum) * 4
    assert resize.full_max_total_num_tokens == (resize.max_total_num_tokens if name == "full" else None)
    pool.close()


def test_a_numpy_size_is_a_size_to_all_of_them(pool: UnifiedKVPool) -> None:
    resize = resize_for(pool, np.int64(LIMIT // 2))
    assert resize == resize_for(pool, LIMIT // 2)
    assert type(resize.max_total_num_tokens) is type(resize.unified_memory_pool_bytes) is int
    allocator = UnifiedSWATokenToKVPoolAllocator(pool)
    config = msgspec.structs.replace(resize, unified_memory_pool_bytes=np.int64(LIMIT // 2))
    pool.finalize_backing(config)
    allocator.resize(config)
    assert allocator.size_full == resize.full_max_total_num_tokens
    assert allocator.alloc(8, swa_tail_len=np.int64(4)) is not None


def test_it_is_sglangs_struct() -> None:
    resize = PostCaptureKVResize(max_total_num_tokens=7)
    assert msgspec.json.decode(msgspec.json.encode(resize), type=PostCaptureKVResize) == resize
    assert PostCaptureKVResize.__struct_fields__ == (
        "max_total_num_tokens",
        "full_max_total_num_tokens",
        "swa_max_total_num_tokens",
        "unified_memory_pool_bytes",
        "capped_max_running_requests",
    )
    with pytest.raises(AttributeError):
        resize.max_total_num_tokens = 8  # type: ignore[misc]


def test_after_out_of_memory_less_is_tried_down_to_the_floor(pool: UnifiedKVPool) -> None:
    resize = smaller_resize(pool, resize_for(pool, 4 * LIMIT))
    assert resize.unified_memory_pool_bytes == pool.driver.free_bytes() < LIMIT
    seen = [resize.unified_memory_pool_bytes]
    while seen[-1] > pool.floor_bytes:
        resize = smaller_resize(pool, resize)
        assert resize.unified_memory_pool_bytes is not None
        seen.append(resize.unified_memory_pool_bytes)
    assert seen == sorted(set(seen), reverse=True)
    with pytest.raises(PoolSizeError, match="Not even") as refused:
        smaller_resize(pool, resize)
    assert refused.value.minimum == pool.floor_bytes
    with pytest.raises(PoolSizeError):
        resize_for(pool, pool.floor_bytes - 1)
