"""The contract's asserts are explained as a test file's are."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kvarena.pool.testing.pool_contract", "kvarena.pool.testing.pool_fault_contract"
)
