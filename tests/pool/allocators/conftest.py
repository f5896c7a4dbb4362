"""The contracts' asserts are explained as a test file's are; torch works on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite(
    "kvarena.pool.testing.allocator_contract",
    "kvarena.pool.testing.allocator_ids_contract",
    "kvarena.pool.testing.allocator_samples",
    "kvarena.pool.testing.resize_contract",
)


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """The tensors are small: on a busy machine, waiting for other threads is all that they would add."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
