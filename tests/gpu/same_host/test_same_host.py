"""The same-host engine between two processes on one GPU, and between two GPUs where there are two."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from kvarena.transfer import PageBatch
from kvarena.transfer.testing import assert_same_bytes

if TYPE_CHECKING:
    from kvarena.transfer.testing import RemoteHost
    from same_host_gpu_support import CudaHost

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
MIB = 1 << 20
Pair = tuple["CudaHost", "RemoteHost"]


def randomize(here: CudaHost) -> bytes:
    words = here.memory.arena.tensor[: 64 * MIB].view(torch.int64)
    words.random_()
    torch.cuda.synchronize()
    return here.read(0, 64 * MIB)


def lease_of(pages: np.ndarray, serial: int = 1) -> object:
    from kvarena.transfer import Lease

    return Lease(request="r", serial=serial, epoch=0, pages={"full": tuple(pages.tolist())})


@pytest.mark.parametrize(
    ("page_bytes", "pages"),
    [(65536, 500), (16384, 2000), (20480, 700), (3008, 9000), (100, 20000), (16, 300_000), (MIB, 30)],
)
def test_random_pages_arrive_and_no_other_byte_changes(pair: Pair, page_bytes: int, pages: int) -> None:
    here, there = pair
    sent = randomize(here)
    there.process.call("fill", 0xA5)
    rng = np.random.default_rng(page_bytes)
    places = 64 * MIB // page_bytes
    src, dst = rng.permutation(places)[:pages], rng.permutation(places)[:pages]
    lease = lease_of(dst)
    there.process.call("expect", lease)
    peer = here.engine.connect(there.describe())
    here.engine.submit_pages(peer, PageBatch(src, dst, page_bytes, lease)).wait(20)  # type: ignore[arg-type]
    assert there.process.call("arrived")
    used = places * page_bytes
    expected = np.full((places, page_bytes), 0xA5, np.uint8)
    expected[dst] = np.frombuffer(sent, np.uint8)[:used].reshape(places, page_bytes)[src]
    assert_same_bytes(there.read(0, used), expected.tobytes())
    assert_same_bytes(there.read(used, 64 * MIB - used), b"\xa5" * (64 * MIB - used))


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 0, 64 * MIB)],
        [(0, 48 * MIB, 16 * MIB), (20 * MIB, 0, 9 * MIB), (40 * MIB, 30 * MIB, 4096)],
        [(1, 7, 10_001), (100_000, 200_003, 1), (300_000, 400_000, 0), (500_001, 500_001, 40_000)],
        [(16 * i, 32 * i, 16) for i in range(40_000)],
    ],
    ids=["whole", "large", "odd", "many"],
)
def test_ranges_arrive_and_no_other_byte_changes(pair: Pair, copies: list[tuple[int, int, int]]) -> None:
    here, there = pair
    sent = np.frombuffer(randomize(here), np.uint8)
    there.process.call("fill", 0xA5)
    peer = here.engine.connect(there.describe())
    src, dst, lengths = (np.array(column, np.int64) for column in zip(*copies, strict=True))
    here.engine.submit(peer, here.base + src, there.base + dst, lengths).wait(20)
    expected = np.full(64 * MIB, 0xA5, np.uint8)
    for start, end, nbytes in copies:
        expected[end : end + nbytes] = sent[start : start + nbytes]
    assert_same_bytes(there.read(0, 64 * MIB), expected.tobytes())


def test_a_copy_waits_for_the_stream_that_writes_its_source(pair: Pair) -> None:
    here, there = pair
    peer = here.engine.connect(there.describe())
    here.engine.prepare(16384)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        here.memory.arena.tensor[: 64 * MIB].fill_(0x3C)
    pages = np.arange(4096)
    lease = lease_of(pages)
    there.process.call("expect", lease)
    pending = here.engine.submit_pages(peer, PageBatch(pages, pages, 16384, lease, after=stream.cuda_stream))
    pending.wait(20)
    assert_same_bytes(there.read(0, 64 * MIB), b"\x3c" * (64 * MIB))


def test_the_receiver_hears_from_the_sender_alone(pair: Pair) -> None:
    """Nobody in the sending process looks at the copy, and the receiver knows all the same."""
    here, there = pair
    sent = randomize(here)
    peer = here.engine.connect(there.describe())
    pages = np.random.default_rng(9).permutation(4096)[:700]
    lease = lease_of(pages)
    there.process.call("expect", lease)
    pending = [
        here.engine.submit_pages(peer, PageBatch(part, part, 16384, lease))  # type: ignore[arg-type]
        for part in np.array_split(pages, 7)
    ]
    assert there.process.call("arrived")
    rows = np.frombuffer(there.read(0, 64 * MIB), np.uint8).reshape(4096, 16384)
    assert np.array_equal(rows[pages], np.frombuffer(sent, np.uint8).reshape(4096, 16384)[pages])
    for one in pending:
        one.wait(10)


def test_growth_and_give_back_under_traffic(pair: Pair) -> None:
    here, there = pair
    sent = randomize(here)
    peer = here.engine.connect(there.describe())
    stop = threading.Event()
    failures: list[Exception] = []
    rounds = 0

    def traffic() -> None:
        nonlocal rounds
        try:
            while not stop.is_set():
                rounds += 1
                pages = np.random.default_rng(rounds).permutation(4096)[:512]
                here.engine.submit_pages(peer, PageBatch(pages, pages, 16384, lease_of(pages, rounds))).wait(
                    20
                )  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - the test's own thread asserts on it
            failures.append(error)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        for _ in range(10):
            there.process.call("fill_and_grow_cycle", 64 * MIB, 96 * MIB)
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert rounds >= 10
    every = np.arange(4096)
    here.engine.submit_pages(peer, PageBatch(every, every, 16384, lease_of(every, 0))).wait(20)  # type: ignore[arg-type]
    assert_same_bytes(there.read(0, 64 * MIB), sent)
    assert here.engine.peer(peer).mapped_bytes == 64 * MIB


def test_a_dead_receivers_memory_is_let_go(pair: Pair) -> None:
    from kvarena.transfer import TransferFailed

    here, there = pair
    peer = here.engine.connect(there.describe())
    here.engine.submit(peer, [here.base], [there.base], [MIB]).wait(20)
    free = torch.cuda.mem_get_info(0)[0]
    there.process.kill()
    with pytest.raises(TransferFailed):
        keep_sending(here, there, peer)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info(0)[0] >= free


def keep_sending(here: CudaHost, there: RemoteHost, peer: str) -> None:
    """For as long as the engine takes it, at most 20 s."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        here.engine.submit(peer, [here.base], [there.base], [MIB]).wait(20)
        time.sleep(0.01)
