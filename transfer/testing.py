"""Test your own transfer engine: inherit `TransferEngineContract`, or stack a `FailingEngine`.

The pytest plugin that kvarena installs makes assertions in the contract readable.
"""

from __future__ import annotations

from kvarena.transfer._testing_adaptor import FailingEngine
from kvarena.transfer._testing_contract import TransferEngineContract
from kvarena.transfer._testing_hosts import (
    EngineFactory,
    EngineHost,
    Memory,
    MemoryFactory,
    PeerProcess,
    RemoteHost,
    Standalone,
)
from kvarena.transfer._testing_memory import HostMemory, assert_same_bytes, leftovers
from kvarena.transfer._testing_pairs import Pair
from kvarena.transfer.recording import RecordingEngine

__all__ = [
    "EngineFactory",
    "EngineHost",
    "FailingEngine",
    "HostMemory",
    "Memory",
    "MemoryFactory",
    "Pair",
    "PeerProcess",
    "RecordingEngine",
    "RemoteHost",
    "Standalone",
    "TransferEngineContract",
    "assert_same_bytes",
    "leftovers",
]
