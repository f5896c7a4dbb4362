"""How kvarena finds the engine."""

from __future__ import annotations

from kvarena.hooks import TransferConfig, hookimpl

from kvarena_example_engine.engine import SocketEngine


@hookimpl
def kvarena_transfer_engines(config: TransferConfig) -> list[SocketEngine]:
    """Make the engine if it is asked for by name."""
    return [SocketEngine(config.hostname)] if "socket" in config.engines else []
