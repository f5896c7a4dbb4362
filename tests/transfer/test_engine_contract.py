"""Our own engines keep the contract that we ask of others."""

from __future__ import annotations

from kvarena.transfer import MooncakeEngine, NixlEngine, RecordingEngine
from kvarena.transfer.testing import Standalone, TransferEngineContract


class TestRecordingEngine(TransferEngineContract):
    engine_factory = Standalone(RecordingEngine)
    in_process = True


class TestMooncakeEngine(TransferEngineContract):
    engine_factory = Standalone(MooncakeEngine, timeout=5)
    reuses_engines = True  # closing one takes Mooncake a second


class TestNixlEngine(TransferEngineContract):
    engine_factory = Standalone(NixlEngine, timeout=10)
    reuses_engines = True
