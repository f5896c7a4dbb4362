"""Numbers that no memory has, given to the engines of others: a typed error, and everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from kvarena.transfer import (
    MooncakeEngine,
    NixlEngine,
    Region,
    RegistrationError,
    TransferEngine,
    TransferFailed,
)
from kvarena.transfer.testing import HostMemory

MIB = 1 << 20
PAGE = 4096


class Sides(NamedTuple):
    """A sender, a receiver, their memory, and the receiver's key."""

    sender: TransferEngine
    receiver: TransferEngine
    source: HostMemory
    target: HostMemory
    peer: str


@pytest.fixture(scope="module", params=[MooncakeEngine, NixlEngine])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    source, target = HostMemory(2 * MIB, 2 * MIB), HostMemory(2 * MIB, 2 * MIB)
    sender, receiver = request.param(timeout=5), request.param(timeout=5)
    sender.register([Region(source.base, MIB)])
    receiver.register([Region(target.base, MIB)])
    yield Sides(sender, receiver, source, target, sender.connect(receiver.describe()))
    for part in (sender, receiver, source, target):
        part.close()


def still_moves(sides: Sides, fill: int) -> bool:
    sides.source.write(0, bytes([fill]) * PAGE)
    sides.sender.submit(sides.peer, [sides.source.base], [sides.target.base], [PAGE]).wait(30)
    return sides.target.read(0, PAGE) == bytes([fill]) * PAGE


@pytest.mark.parametrize("address", [-8, 1 << 64, (1 << 64) - PAGE])
def test_a_region_where_no_memory_can_be_is_refused_with_those_beside_it(sides: Sides, address: int) -> None:
    beside = Region(sides.source.base + MIB, PAGE)
    with pytest.raises(RegistrationError):
        sides.sender.register([beside, Region(address, 2 * PAGE)])
    sides.sender.register([beside])
    sides.sender.unregister([beside])
    assert still_moves(sides, abs(address) % 251)


@pytest.mark.parametrize("length", [-1, 0, 1 << 64])
def test_a_region_of_a_length_that_cannot_be_is_refused(sides: Sides, length: int) -> None:
    with pytest.raises(RegistrationError):
        sides.sender.register([Region(sides.source.base + MIB, length)])
    assert still_moves(sides, 3 + length % 7)


@pytest.mark.parametrize(
    "odd",
    [[-8], [1 << 63], [1 << 64], [0.5], [float("nan")], ["1"], [None], [(1 << 63) - 4], np.array([1.0])],
)
@pytest.mark.parametrize("column", ["src", "dst"])
def test_an_address_that_cannot_be_is_refused_and_the_peer_stays(sides: Sides, column: str, odd: Any) -> None:
    good = {"src": [sides.source.base], "dst": [sides.target.base], "lengths": [8]}
    with pytest.raises(TransferFailed):
        sides.sender.submit(sides.peer, **{**good, column: odd})
    assert still_moves(sides, 9)


@pytest.mark.parametrize("odd", [[-1], [1 << 63], [1.5], ["8"], [8, 8], [(1 << 63) - 1]])
def test_a_length_that_cannot_be_is_refused_and_the_peer_stays(sides: Sides, odd: Any) -> None:
    with pytest.raises(TransferFailed):
        sides.sender.submit(sides.peer, [sides.source.base], [sides.target.base], odd)
    assert still_moves(sides, 11)
