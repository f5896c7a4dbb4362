"""Small engines on a CUDA device, and the same over the host driver: no test runs first on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from kvarena.hooks import TransferConfig, create_manager, hookimpl
from kvarena.hooks.defaults import DefaultBudget, DefaultDrivers, DefaultRefusals
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.embedded.config import EngineConfig, ModelConfig
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.transfer import Addresses, Pending, RecordingEngine, TransferEngine

CONFIG = EngineConfig(model=ModelConfig(window=48), page_size=16, chunk_pages=4, context_length=512)
POOL_BYTES = 12 << 20


class DeviceCopies(RecordingEngine):
    """Moves device memory within this process, which no transfer engine has to be installed for."""

    def __init__(self) -> None:
        super().__init__(moves_memory=False)

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Pending:
        from cuda.bindings import driver

        pending = super().submit(peer, list(src), list(dst), list(lengths))
        for source, target, nbytes in zip(src, dst, lengths, strict=True):
            (code,) = driver.cuMemcpyDtoD(int(target), int(source), int(nbytes))
            assert code == 0
        torch.cuda.synchronize()
        return pending


class _OneEngine:
    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    @hookimpl
    def kvarena_transfer_engines(self, config: TransferConfig) -> list[TransferEngine]:
        return [self._engine]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(request.param)


@pytest.fixture
def make_engine(device: str) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as closing:

        def make(*, eager_bytes: int | None = None, captured: bool = True) -> Engine:
            transfer = DeviceCopies() if device == "cuda" else RecordingEngine()
            plugins = (DefaultDrivers(), DefaultRefusals(), DefaultBudget(), _OneEngine(transfer))
            engine = Engine(
                CONFIG.evolve(device=device),
                Settings(pool_bytes=POOL_BYTES),
                eager_bytes=eager_bytes,
                captured=captured,
                manager=create_manager(plugins, entry_points=False),
            )
            closing.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def texts() -> list[Request]:
    """Requests shorter and longer than the window (48) and than a chunk (64)."""
    words = b"Nothing that went to nought was meant to be kept. " * 10
    return [Request(rid, [256, *words[:length]], 24) for rid, length in enumerate((1, 40, 63, 64, 200, 450))]
