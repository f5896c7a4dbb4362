"""A pool that was planned for a sequence holds that sequence, at every length."""

from __future__ import annotations

import pytest
from kvarena.plugin.engines.embedded.config import FULL, WINDOW, EngineConfig
from kvarena.plugin.engines.embedded.engine import sub_pool_specs
from kvarena.plugin.engines.embedded.page_book import PageBook
from kvarena.pool import HostVmm, UnifiedKVPool, UnifiedSWATokenToKVPoolAllocator


@pytest.mark.parametrize("pages", [1, 5, 12, 13, 14, 15, 40])
def test_a_pool_planned_for_one_sequence_says_that_it_holds_it(pages: int) -> None:
    # 13 pages are as many as the window side ever holds of a sequence.
    config = EngineConfig(context_length=16 * pages, batch_sizes=(1,))
    pool = UnifiedKVPool(
        total_bytes=config.planned_bytes(),
        sub_pool_specs=sub_pool_specs(config),
        driver=HostVmm(),
        page_size=config.page_size,
    )
    book = PageBook(config, pool, UnifiedSWATokenToKVPoolAllocator(pool, FULL, WINDOW))
    capacity = book.capacity_tokens()
    pool.close()
    assert capacity >= config.context_length
