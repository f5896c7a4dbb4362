"""Our own engines keep the contract that we ask of others."""

from __future__ import annotations

import pytest
from kvarena.transfer import MooncakeEngine, NixlEngine, RecordingEngine, Region, TransferFailed
from kvarena.transfer.testing import Standalone, TransferEngineContract


class TestRecordingEngine(TransferEngineContract):
    engine_factory = Standalone(RecordingEngine)
    in_process = True


def test_a_recorded_transfer_wants_its_sources_registered_too(
    kvarena_recording_pair: tuple[RecordingEngine, RecordingEngine],
) -> None:
    """NIXL and RDMA do; who tests against a record must learn of it there."""
    source, target = kvarena_recording_pair
    source.moves_memory = False
    target.register([Region(4096, 4096)])
    peer = source.connect(target.describe())
    with pytest.raises(TransferFailed, match="no registered region here"):
        source.submit(peer, [4096], [4096], [64])
    source.register([Region(4096, 4096)])
    source.submit(peer, [4096], [4096], [64]).wait()


class TestRecordingEngineReused(TransferEngineContract):
    engine_factory = Standalone(RecordingEngine)
    in_process = True
    reuses_engines = True


class TestMooncakeEngine(TransferEngineContract):
    engine_factory = Standalone(MooncakeEngine, timeout=5)
    reuses_engines = True  # closing one takes Mooncake a second


class TestNixlEngine(TransferEngineContract):
    engine_factory = Standalone(NixlEngine, timeout=10)
    reuses_engines = True
    # Of each peer that was disconnected, UCX keeps a socket for as long as the agent lives.
    leak_allowance = (10, 16, 0)
