"""A pool with a real allocator and a real status file, in a directory of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kvarena.plugin.config import Settings
from kvarena.plugin.lifecycle import PoolLifecycle
from kvarena.pool import MHASubPoolSpec, UnifiedSWATokenToKVPoolAllocator, resize_for

SPECS = (
    MHASubPoolSpec("full", "up", 2, 2, 32, torch.float16),
    MHASubPoolSpec("swa", "down", 2, 4, 32, torch.float16),
)
MIB = 1 << 20


class Served:
    """What an engine has: a lifecycle, and an allocator above its pool."""

    def __init__(self, settings: Settings, name: str, *, post_capture: bool = True) -> None:
        self.lifecycle = PoolLifecycle(settings, device="cpu", name=name)
        self.pool = self.lifecycle.reserve(
            SPECS, total_bytes=8 * MIB, page_size=16, post_capture=post_capture
        )
        self.allocator = UnifiedSWATokenToKVPoolAllocator(self.pool)

    def finalize(self, total_bytes: int) -> None:
        """As an engine does after capture."""
        self.lifecycle.timeline.add("captured", how="plain")
        self.lifecycle.finalize(resize_for(self.pool, total_bytes), self.allocator)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def serve(directory: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(name: str = "decode", *, post_capture: bool = True, **settings: object) -> Served:
        merged = {"socket_dir": str(directory), "load_plugins": False, "memory_limit": 64 * MIB} | settings
        made.append(Served(Settings(**merged), name, post_capture=post_capture))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.lifecycle.close()
