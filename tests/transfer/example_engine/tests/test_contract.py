"""The contract that kvarena's own engines pass."""

from __future__ import annotations

from kvarena.transfer.testing import Pair, Standalone, TransferEngineContract
from kvarena_example_engine import SocketEngine


class TestSocketEngine(TransferEngineContract):
    engine_factory = Standalone(SocketEngine)

    def test_of_our_own(self, ready: Pair) -> None:
        peer = ready.connect()
        ready.submit(peer, (0, 4096, 64)).wait(self.timeout)
        assert ready.target.read(4096, 64) == ready.source.read(0, 64)
