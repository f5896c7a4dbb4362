"""The contracts' asserts are explained as a test file's are."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kvarena.pool.allocator_contract", "kvarena.pool.allocator_samples", "kvarena.pool.resize_contract"
)
