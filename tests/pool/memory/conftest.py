"""The contracts' asserts are explained as a test file's are."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kvarena.pool.arena_contract", "kvarena.pool.driver_contract")
