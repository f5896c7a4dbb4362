"""The same-host engine keeps the contract of every engine, over two real processes."""

from __future__ import annotations

from kvarena.transfer.testing import TransferEngineContract
from same_host_support import ArenaMemory, MakeEngine


class TestSameHostEngine(TransferEngineContract):
    engine_factory = MakeEngine()
    memory_factory = ArenaMemory
