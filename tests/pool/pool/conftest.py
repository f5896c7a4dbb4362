"""The contract's asserts are explained as a test file's are."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kvarena.pool.pool_contract", "kvarena.pool.pool_fault_contract")
