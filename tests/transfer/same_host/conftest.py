"""Pairs of same-host engines: the sender here, the receiver in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvarena.transfer.testing import PeerProcess, RemoteHost

# Spawned processes take our sys.path, and so find the support module by its name.
sys.path.insert(0, str(Path(__file__).parent))

from same_host_support import MIB, ArenaMemory, MakeEngine, SameHost


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where sockets go; short enough for any test's name."""
    return tmp_path / "s"


@pytest.fixture(scope="session")
def processes() -> Iterator[list[PeerProcess]]:
    """Processes for receivers; a test that kills one leaves the next test to start another."""
    started: list[PeerProcess] = []
    yield started
    for process in started:
        process.close()


@pytest.fixture
def make_receiver(processes: list[PeerProcess], directory: Path) -> Iterator[Callable[..., RemoteHost]]:
    """Makes a receiver in another process: reserved 16 MiB, backed 8, all of it registered."""
    made: list[RemoteHost] = []

    def make(**options: Any) -> RemoteHost:
        if not processes or not processes[-1].alive:
            processes.append(PeerProcess())
        factory = MakeEngine(directory, **{"name": "receiver", **options})
        host = RemoteHost(processes[-1], factory, ArenaMemory, 16 * MIB, 8 * MIB, host=SameHost)
        made.append(host)
        host.register((0, 8 * MIB))
        return host

    yield make
    for host in made:
        host.close()


@pytest.fixture
def receiver(make_receiver: Callable[..., RemoteHost]) -> RemoteHost:
    """One receiver."""
    return make_receiver()


@pytest.fixture
def make_sender(directory: Path) -> Iterator[Callable[..., SameHost]]:
    """Makes a sender in this process, all of its 8 MiB registered and filled with numbers."""
    made: list[SameHost] = []

    def make(at: Path = directory, **options: Any) -> SameHost:
        factory = MakeEngine(at, **{"name": "sender", **options})
        host = SameHost(factory, ArenaMemory, 16 * MIB, 8 * MIB)
        made.append(host)
        host.register((0, 8 * MIB))
        words = host.memory.arena.tensor[: 8 * MIB].numpy().view(np.int64)
        words[:] = np.arange(1, words.size + 1)  # no two pages are alike
        return host

    yield make
    for host in made:
        host.close()


@pytest.fixture
def sender(make_sender: Callable[..., SameHost]) -> SameHost:
    """One sender."""
    return make_sender()
