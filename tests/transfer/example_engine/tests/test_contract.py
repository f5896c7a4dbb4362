"""The contract that kvarena's own engines pass."""

from __future__ import annotations

from kvarena.transfer.testing import Standalone, TransferEngineContract
from kvarena_example_engine import SocketEngine


class TestSocketEngine(TransferEngineContract):
    engine_factory = Standalone(SocketEngine)
