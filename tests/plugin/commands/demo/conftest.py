"""One small demo run with real processes and real Mooncake, shared by the tests of a module."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import pytest
from kvarena.plugin.commands.demo.run import Demo, DemoOptions
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.config import EngineConfig, ModelConfig
from kvarena.plugin.engines.embedded.requests import Request, prompt_tokens
from kvarena.plugin.engines.embedded.worker import Role

TEXT = b"What is on its way stays where it is. The numbers in the letters did not change. " * 3
CONFIG = EngineConfig(
    model=ModelConfig(
        layer_num=4,
        hidden_size=64,
        intermediate_size=96,
        head_num=4,
        head_dim=16,
        full_kv_head_num=1,
        window_kv_head_num=2,
        window=20,
    ),
    page_size=8,
    chunk_pages=4,
    context_length=256,
    batch_sizes=(1, 2, 4),
)
# Far longer than a loaded machine lets a process wait for its turn.
SETTINGS = Settings(memory_limit=1 << 20, transfer=("mooncake",), transfer_timeout=60.0, load_plugins=False)


@pytest.fixture(scope="session", autouse=True)
def _mooncake() -> None:
    from kvarena.transfer import EngineUnavailable, MooncakeEngine

    try:
        MooncakeEngine("127.0.0.1").close()
    except EngineUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"Mooncake cannot run here: {error}")


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    """Shorter and longer than the window (20) and than a chunk (32)."""
    return [Request(rid, prompt_tokens(TEXT[:length]), 8) for rid, length in enumerate((5, 30, 31, 100, 200))]


@pytest.fixture(scope="session")
def endless() -> list[Request]:
    """Far more than run at once, with long answers: whoever acts on the first is in the middle of them."""
    return [Request(rid, prompt_tokens(TEXT[:30]), 200) for rid in range(24)]


@pytest.fixture(scope="session")
def make_demo() -> Callable[..., Demo]:
    def make(
        requests: list[Request],
        *,
        timeout: float = SETTINGS.transfer_timeout,
        transfer: str = "mooncake",
        socket_dir: str | None = None,
        headroom: int = 0,
        reserved_bytes: int | None = None,
        on_event: Callable[[Role, control.Message], None] = lambda role, message: None,
        **more: object,
    ) -> Demo:
        settings = msgspec.structs.replace(
            SETTINGS,
            transfer_timeout=timeout,
            transfer=(transfer,),
            socket_dir=socket_dir,
            headroom=headroom,
        )
        config = CONFIG.evolve(reserved_bytes=reserved_bytes)
        return Demo(config, settings, requests, DemoOptions(**more), on_event=on_event)  # type: ignore[arg-type]

    return make
