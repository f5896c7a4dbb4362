"""The fixtures that kvarena brings to anyone's pytest, and what they notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvarena.pool import Arena, UnifiedKVPool


def test_the_arena_has_a_seam(kvarena_arena: Arena) -> None:
    assert kvarena_arena.backed_bytes == 4 << 20
    assert kvarena_arena.seams == (kvarena_arena.base + (2 << 20),)
    kvarena_arena.tensor[: kvarena_arena.backed_bytes].fill_(7)


def test_the_reserved_pool_has_its_sink(kvarena_reserved_pool: UnifiedKVPool) -> None:
    assert not kvarena_reserved_pool.finalized
    assert kvarena_reserved_pool.active_allocation_bytes == kvarena_reserved_pool.sink_bytes


def test_the_pool_is_final(kvarena_pool: UnifiedKVPool) -> None:
    assert kvarena_pool.finalized
    assert kvarena_pool.get_contiguous_buf_infos().lens == [4 << 20] * 2


@pytest.mark.parametrize(("leak", "status"), [("", 0), ("kvarena_arena.driver.create(2 << 20)", 1)])
def test_memory_left_behind_fails_the_test(tmp_path: Path, leak: str, status: int) -> None:
    (tmp_path / "test_it.py").write_text(
        f"def test_it(kvarena_arena):\n    assert kvarena_arena\n    {leak}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == status, result.stdout
    assert ("memory of the arena was not given back" in result.stdout) == bool(status)
