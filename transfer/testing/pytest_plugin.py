"""The pytest plugin that kvarena installs, for who tests a transfer engine.

It is loaded by every pytest run in the environment, so it imports nothing of kvarena's until a test asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvarena.transfer.testing import HostMemory, PeerProcess, RecordingEngine
    from kvarena.transfer.testing.hosts import Sides

__all__ = ["kvarena_memory", "kvarena_peer_process", "kvarena_recording_pair", "kvarena_sides"]

pytest.register_assert_rewrite(
    *(f"kvarena.transfer.testing.{part}" for part in ("contract", "pairs", "registration", "transfers"))
)


@pytest.fixture
def kvarena_memory() -> Iterator[Callable[[int, int], HostMemory]]:
    """Make host memory of which only a prefix is backed: ``kvarena_memory(reserved_bytes, backed_bytes)``."""
    from kvarena.transfer.testing import HostMemory

    made: list[HostMemory] = []

    def make(reserved_bytes: int, backed_bytes: int) -> HostMemory:
        made.append(HostMemory(reserved_bytes, backed_bytes))
        return made[-1]

    yield make
    for memory in made:
        memory.close()


@pytest.fixture
def kvarena_peer_process() -> Iterator[Callable[[], PeerProcess]]:
    """Start a process that can host a `RemoteHost`: ``kvarena_peer_process()``."""
    from kvarena.transfer.testing import PeerProcess

    made: list[PeerProcess] = []

    def make() -> PeerProcess:
        made.append(PeerProcess())
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.fixture(scope="class")
def kvarena_sides() -> Iterator[Sides]:
    """What the tests of one `TransferEngineContract` share."""
    from kvarena.transfer.testing.hosts import Sides

    sides = Sides()
    yield sides
    sides.close()


@pytest.fixture
def kvarena_recording_pair() -> Iterator[tuple[RecordingEngine, RecordingEngine]]:
    """Two `RecordingEngine` of this process; nothing is connected."""
    from kvarena.transfer.testing import RecordingEngine

    pair = RecordingEngine("source"), RecordingEngine("target")
    yield pair
    for engine in pair:
        engine.close()
