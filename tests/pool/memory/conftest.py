"""The contracts' asserts are explained as a test file's are."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kvarena.pool.testing.arena_contract",
    "kvarena.pool.testing.arena_fault_contract",
    "kvarena.pool.testing.allocator_samples",
    "kvarena.pool.testing.device_contract",
    "kvarena.pool.testing.driver_contract",
)
