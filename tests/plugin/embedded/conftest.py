"""Small engines, and a pair of servers of which one process turns both wheels."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from kvarena.hooks import HookManager, TransferConfig, create_manager, hookimpl
from kvarena.hooks.defaults import DefaultBudget, DefaultDrivers, DefaultEngines, DefaultRefusals
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.config import EngineConfig, ModelConfig
from kvarena.plugin.engines.embedded.decode import DecodeServer
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.prefill import PrefillServer
from kvarena.plugin.engines.embedded.reference import SingleServer
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.transfer import RecordingEngine, TransferEngine

SMALL = EngineConfig(
    model=ModelConfig(
        layer_num=4,
        hidden_size=64,
        intermediate_size=96,
        head_num=4,
        head_dim=16,
        full_kv_head_num=1,
        window_kv_head_num=2,
        window=12,
    ),
    page_size=4,
    chunk_pages=4,
    context_length=96,
    batch_sizes=(1, 2, 4),
)
MEMORY_LIMIT = 1 << 20


class _OneEngine:
    """Answers the hook with an engine that the test has in its hands."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    @hookimpl
    def kvarena_transfer_engines(self, config: TransferConfig) -> list[TransferEngine]:
        return [self._engine]


def _manager(memory_limit: int, transfer: TransferEngine | str) -> HookManager:
    engines = DefaultEngines() if isinstance(transfer, str) else _OneEngine(transfer)
    plugins = (DefaultDrivers(memory_limit), DefaultRefusals(), DefaultBudget(), engines)
    return create_manager(plugins, entry_points=False)


MakeEngine = Callable[..., Engine]


@pytest.fixture
def small() -> EngineConfig:
    return SMALL


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    """Engines that are closed in the end; with a recording transfer engine, or the one given or named."""
    os.chmod(tmp_path, stat.S_IRWXU)
    with ExitStack() as closing:

        def make(
            config: EngineConfig = SMALL,
            *,
            transfer: TransferEngine | str | None = None,
            memory_limit: int = MEMORY_LIMIT,
            timeout: float = 60.0,
            eager_bytes: int | None = None,
            pool_bytes: int | None = None,
        ) -> Engine:
            engine = Engine(
                config,
                Settings(
                    memory_limit=memory_limit,
                    transfer=(transfer,) if isinstance(transfer, str) else (),
                    transfer_timeout=timeout,
                    pool_bytes=pool_bytes,
                    socket_dir=str(tmp_path),
                ),
                eager_bytes=eager_bytes,
                manager=_manager(memory_limit, transfer or RecordingEngine()),
            )
            closing.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def generate(make_engine: MakeEngine) -> Callable[..., dict[int, Result]]:
    """Serve requests on one engine in this process."""

    def run(requests: list[Request], engine: Engine | None = None) -> dict[int, Result]:
        results: dict[int, Result] = {}
        server = SingleServer(engine or make_engine(), lambda result: results.__setitem__(result.rid, result))
        server.run(requests)
        return results

    return run


class Pair:
    """A decode server and a prefill server, and everything that they tell their client."""

    def __init__(self, prefill: Engine, decode: Engine, closing: ExitStack) -> None:
        self.engines = {"prefill": prefill, "decode": decode}
        self.results: dict[int, Result] = {}
        self.said: dict[str, list[control.Message]] = {"prefill": [], "decode": []}
        self.decode = DecodeServer(decode, lambda message: self._hear("decode", message))
        closing.callback(self.decode.close)
        self.prefill = PrefillServer(prefill, lambda message: self._hear("prefill", message))
        closing.callback(self.prefill.close)
        self.prefill.connect(self.decode.hub.address)

    def turn(self) -> None:
        self.prefill.step()
        self.decode.step()

    def turn_until(self, condition: Callable[[], bool], limit: float = 120.0) -> None:
        """Turn both wheels."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < limit, "it did not happen"
            self.turn()

    def hurry(self, role: str, timeout: float) -> None:
        """Shorten a server's timeout once all is well, so that until then it may wait for its turn."""
        server = self.decode if role == "decode" else self.prefill
        server._timeout = timeout

    def connect(self) -> None:
        self.turn_until(lambda: self.heard("prefill", control.Connected))

    def serve(self, requests: list[Request]) -> dict[int, Result]:
        for request in requests:
            self.decode.submit(request)
        self.turn_until(lambda: all(request.rid in self.results for request in requests))
        return self.results

    def heard(self, role: str, kind: type[control.Message]) -> bool:
        return any(isinstance(message, kind) for message in self.said[role])

    def leaks(self) -> list[str]:
        return [leak for engine in self.engines.values() for leak in engine.book.leaks()]

    def _hear(self, role: str, message: control.Message) -> None:
        self.said[role].append(message)
        if isinstance(message, control.Finished):
            assert message.result.rid not in self.results, "a request was answered twice"
            self.results[message.result.rid] = message.result


@pytest.fixture
def make_pair() -> Iterator[Callable[[Engine, Engine], Pair]]:
    with ExitStack() as closing:
        yield lambda prefill, decode: Pair(prefill, decode, closing)


@pytest.fixture
def texts() -> list[Request]:
    """Requests shorter and longer than the window (12), a page (4) and a chunk (16)."""
    words = b"Once a number is on a form, you cannot move it. So we fix the numbers first. "
    return [
        Request(rid, [256, *words[:length]], 10) for rid, length in enumerate((1, 3, 11, 15, 16, 33, 64, 70))
    ]


def changed(config: EngineConfig, **model: object) -> EngineConfig:
    """A copy with other model sizes."""
    return config.evolve(model=msgspec.structs.replace(config.model, **model))


@pytest.fixture
def change_model() -> Callable[..., EngineConfig]:
    return changed
