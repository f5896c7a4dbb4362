"""A bounded fuzz of the control channel and its decoders: nothing crashes, hangs, leaks or is believed.

``KVARENA_FUZZ_SECONDS`` (default 2) is how long each part runs; ``-s`` shows what was tried.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.access import Access, new_secret
from kvarena.plugin.engines.embedded.codec import Codec
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.link import Hub, Spoke
from kvarena.plugin.engines.embedded.peers import check_peer, describe_model
from kvarena.plugin.engines.embedded.requests import Request
from kvarena.transfer import Lease, LeaseError, ManifestMismatch

if TYPE_CHECKING:
    from conftest import Pair  # type: ignore[import-not-found]

SECONDS = float(os.environ.get("KVARENA_FUZZ_SECONDS", "2"))
SEED = 20261201
MAX_GROWTH_BYTES = 64 << 20
# A reserved byte, a text without end, deep nesting, a surrogate, the largest number.
_ODD = (b"\xc1", b"\xdb\xff\xff\xff\xff", b"\x91" * 2000, b"\xa3\xed\xa0\x80", b"\xcf" + b"\xff" * 8)
CHANNELS = (control.TO_CLIENT, control.TO_WORKER, control.TO_DECODE, control.TO_PREFILL)


def _state() -> tuple[int, int]:
    """Descriptors and resident bytes of this process."""
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), resident


def _show(what: str, tried: int, before: tuple[int, int], after: tuple[int, int]) -> None:
    sys.stdout.write(
        f"\n{what}: {tried} tried, 0 crashes, 0 hangs, descriptors {before[0]} -> {after[0]}, "
        f"resident {before[1] >> 10} -> {after[1] >> 10} KiB\n"
    )


def _samples() -> list[bytes]:
    request = Request(1, [256, 65, 66], 4)
    messages = [
        control.Join(b"pages", "model"),
        control.Refused("no"),
        control.Leaving(),
        control.Prefill(request, b"lease"),
        control.PrefillDone(1, 1, {"full": 1}, 65, 0.5, 0.5),
        control.PrefillFailed(1, "why", False),
        control.Abort(1),
        control.Ping(),
        control.Generate(request),
        control.Stopped("", False, {"a": [1, {"b": None}]}),
    ]
    return [msgspec.msgpack.encode(message) for message in messages]


def _mutate(draw: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(data) + 1)
        how = draw.randrange(5)
        if how == 0 and at < len(data):
            data[at] = draw.randrange(256)
        elif how == 1:
            data[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif how == 2:
            del data[at : at + draw.randrange(1, 9)]
        elif how == 3:
            data[at:at] = draw.choice(_ODD)
        else:
            data += data[: draw.randrange(1, 64)]
    return bytes(data)


def _inputs(draw: random.Random, samples: list[bytes]) -> bytes:
    return (
        draw.randbytes(draw.randrange(0, 200)) if draw.random() < 0.2 else _mutate(draw, draw.choice(samples))
    )


def test_decoders_take_any_bytes(make_engine: Callable[..., Engine]) -> None:
    draw, samples, engine = random.Random(SEED), _samples(), make_engine()
    codecs = [Codec(control.TO_DECODE, channel) for channel in CHANNELS]
    lease = Lease(request="1", serial=1, epoch=1, pages={"full": (1, 2)}).encode()
    hello, model = engine.channel.hello(), describe_model(engine.config.model)
    before, tried, end = _state(), 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        tried += 1
        body = _inputs(draw, samples)
        for codec in codecs:
            message = codec.decode([body])
            if message is not None:
                # What was let in can be told to others: no surrogates, no numbers that nothing encodes.
                msgspec.msgpack.encode(message)
        try:
            msgspec.msgpack.encode(Lease.decode(_inputs(draw, [lease])))
        except LeaseError as error:
            str(error).encode()
        try:
            pages, described = _inputs(draw, [hello]), _inputs(draw, [model.encode()])
            check_peer(engine.channel, engine.config.model, pages, described.decode("latin-1"))
        except ManifestMismatch as error:
            str(error).encode()
    after = _state()
    _show("decoders", tried, before, after)
    assert tried > 100
    assert after[0] <= before[0]
    assert after[1] - before[1] < MAX_GROWTH_BYTES


@pytest.mark.parametrize("access", [Access(new_secret()), Access(insecure=True)], ids=["secret", "insecure"])
def test_a_hub_takes_any_connection(access: Access) -> None:
    """Raw TCP without a handshake, half of one, and random bytes, while a friend is still heard."""
    draw = random.Random(SEED)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    with Hub("127.0.0.1", access=access, codec=Codec(control.TO_PREFILL, control.TO_DECODE)) as hub:
        port = int(hub.address.rpartition(":")[2])
        codec = Codec(control.TO_DECODE, control.TO_PREFILL)
        with Spoke(hub.address, b"friend", access=access, codec=codec) as friend:
            before, tried, end = _state(), 0, time.monotonic() + SECONDS
            while time.monotonic() < end:
                tried += 1
                with socket.create_connection(("127.0.0.1", port), timeout=5.0) as stranger:
                    data = _mutate(draw, greeting * draw.randrange(1, 4)) + draw.randbytes(
                        draw.randrange(4000)
                    )
                    try:
                        stranger.sendall(data)
                    except ConnectionError:
                        continue
                hub.receive()
            friend.send(control.Ping())
            limit, heard = time.monotonic() + 30, []
            while (b"friend", control.Ping()) not in heard:
                assert time.monotonic() < limit, "the friend is not heard any more"
                heard += hub.receive(0.1)
            # libzmq closes what does not complete its handshake.
            limit = time.monotonic() + 20
            while _state()[0] > before[0] + 2 and time.monotonic() < limit:
                hub.receive(0.1)
            after = _state()
    _show(f"connections, {'secret' if access.secret else 'insecure'}", tried, before, after)
    assert after[0] <= before[0] + 2
    assert after[1] - before[1] < MAX_GROWTH_BYTES


def _endless(texts: list[Request]) -> Iterator[Request]:
    for rid in itertools.count(1):
        yield Request(rid, texts[rid % len(texts)].tokens, 2)


def test_a_pair_serves_on_beside_a_peer_that_says_anything(
    make_engine: Callable[..., Engine], make_pair: Callable[[Engine, Engine], Pair], texts: list[Request]
) -> None:
    draw, samples = random.Random(SEED), _samples()
    pair = make_pair(make_engine(), make_engine())
    pair.connect()
    before, tried, end = _state(), 0, time.monotonic() + SECONDS
    with Spoke(pair.decode.hub.address, b"liar", codec=Codec(control.TO_DECODE, control.TO_PREFILL)) as liar:
        for request in _endless(texts):
            if time.monotonic() > end:
                break
            for _ in range(50):
                tried += 1
                frames = [_inputs(draw, samples) for _ in range(draw.choice([1, 1, 1, 2, 5]))]
                liar.raw.send_multipart(frames)
            # Raises if the liar has ended a server.
            assert pair.serve([request])[request.rid].reason != "error"
    pair.turn_until(lambda: not pair.prefill.busy)
    after = _state()
    _show("messages beside a served pair", tried, before, after)
    assert pair.leaks() == []
    assert after[0] <= before[0] + 2
    assert after[1] - before[1] < MAX_GROWTH_BYTES
