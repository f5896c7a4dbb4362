"""An arena grows and gives back while a peer writes into it: nothing refused, no byte wrong."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvarena.transfer import (
    ArenaPages,
    Lease,
    MooncakeEngine,
    NixlEngine,
    PageChannel,
    PageMoves,
    Pending,
    Region,
    RegistrationLedger,
    TransferEngine,
)
from kvarena.transfer.testing import EngineHost, PeerProcess, RemoteHost, Standalone

MIB = 1 << 20
IN_FLIGHT = 4
PAGES_OF_A_REQUEST = 24


@pytest.fixture
def hosts() -> Any:
    return importlib.import_module("arena_hosts")


class Sender:
    """The prefill side: keeps a few requests under way."""

    def __init__(self, host: EngineHost, receiver: RemoteHost, hosts: Any) -> None:
        self.host = host
        self.call = receiver.process.call
        self.page = hosts.PAGE
        self.content: Callable[[str, int], bytes] = hosts.page_bytes_of
        pages = {"full": ArenaPages(host.base, host.memory.backed_bytes // self.page)}
        self.channel = PageChannel(host.ledger, hosts.MANIFEST, lambda: pages)
        self.epochs: set[int] = set()
        self.sent = self.asked_again = self.wrong = 0

    def start(self, request: str, slot: int) -> tuple[str, int, Pending] | None:
        answer = self.call("ask", request, PAGES_OF_A_REQUEST)
        if answer is None:
            self.asked_again += 1
            return None
        lease = Lease.decode(answer[0])
        self.epochs.add(lease.epoch)
        peer = self.channel.connect(answer[1])
        src = range(slot * PAGES_OF_A_REQUEST, (slot + 1) * PAGES_OF_A_REQUEST)
        for i, page in enumerate(src):
            self.host.write(page * self.page, self.content(request, i))
        moves = {"full": PageMoves(src, lease.pages["full"])}
        return request, lease.serial, self.channel.send(peer, lease, moves)

    def run(self, cycles: int) -> None:
        self.call("start_churn", cycles)
        slots: list[tuple[str, int, Pending] | None] = [None] * IN_FLIGHT
        number, deadline = 0, time.monotonic() + 60
        while self.call("churning") or any(slots):
            assert time.monotonic() < deadline
            for slot, under_way in enumerate(slots):
                if under_way is None:
                    if self.call("churning"):
                        slots[slot] = self.start(f"r{number}", slot)
                        number += 1
                elif under_way[2].done():
                    self.wrong += self.call("finish", under_way[0], under_way[1])
                    self.sent += 1
                    slots[slot] = None


@pytest.fixture
def make_sender(
    kvarena_peer_process: Callable[[], PeerProcess], hosts: Any
) -> Iterator[Callable[[Callable[..., TransferEngine]], Sender]]:
    made: list[EngineHost] = []

    def make(engine: Callable[..., TransferEngine]) -> Sender:
        factory = Standalone(engine)
        size = IN_FLIGHT * PAGES_OF_A_REQUEST * hosts.PAGE
        source = EngineHost(factory, hosts.ArenaMemory, size, size)
        made.append(source)
        source.move_ledger()
        receiver = RemoteHost(
            kvarena_peer_process(), factory, hosts.ArenaMemory, 8 * MIB, 2 * MIB, host=hosts.Receiver
        )
        return Sender(source, receiver, hosts)

    yield make
    for host in made:
        host.close()


@pytest.mark.parametrize("engine", [MooncakeEngine, NixlEngine])
def test_traffic_goes_on_while_the_receiver_grows_and_gives_back(
    make_sender: Callable[..., Sender], engine: Callable[..., TransferEngine]
) -> None:
    sender = make_sender(engine)
    sender.run(cycles=4)
    assert sender.wrong == 0
    assert sender.sent >= 4 * 4 * 2
    assert len(sender.epochs) >= 6  # leases were granted before and after many of the changes


def test_an_engine_that_cannot_follow_is_quiesced_instead(
    make_sender: Callable[..., Sender], hosts: Any
) -> None:
    sender = make_sender(hosts.SlowMooncake)
    sender.run(cycles=2)
    assert sender.wrong == 0
    assert sender.sent >= 2 * 4 * 2


def test_memfd_of_odd_length_is_registered_from_inside_and_the_engine_ends_empty(hosts: Any) -> None:
    # Public case O13 on real memory: a length that is no multiple of 2 MiB.
    page, backed = 16384, 3 * MIB + 12288
    memory = hosts.ArenaMemory(8 * MIB, backed)
    engine = MooncakeEngine()
    ledger = RegistrationLedger(engine)
    base = memory.base
    aliases = [Region(base + page, backed), Region(base + page, MIB), Region(base + 2 * page, 2 * MIB)]
    ledger.move_to(aliases, backed=memory.backed)
    assert ledger.regions == (Region(base + page, backed - page),)
    peer = MooncakeEngine()
    memory.write(0, b"from")
    to = peer.connect(engine.describe())
    peer.submit(to, [base], [base + backed - 4], [4]).wait(20)
    assert memory.read(backed - 4, 4) == b"from"
    ledger.clear()
    # Mooncake holds nothing any more: what overlapped can be registered in another shape.
    ledger.move_to([Region(base, backed)], backed=memory.backed)
    ledger.clear()
    for one in (peer, engine):
        one.close()
    memory.close()
