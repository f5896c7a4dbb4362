"""What transfers through an engine must do."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading

import numpy as np
import pytest
from kvarena.transfer.errors import TransferFailed, TransferTimeout
from kvarena.transfer.pages.plan import PageSide, plan_page_copies
from kvarena.transfer.testing.hosts import RemoteHost
from kvarena.transfer.testing.memory import assert_same_bytes
from kvarena.transfer.testing.pairs import EnginePairs, Pair, ends, pattern, some_pages

__all__ = ["TransferContract"]


class TransferContract(EnginePairs):
    """Every byte arrives where it belongs, and no other byte changes."""

    def test_written_pages_arrive_and_no_other_byte_changes(self, ready: Pair) -> None:
        peer = ready.connect()
        expected = bytearray(pattern(2, self.backed_bytes))
        num_pages = self.backed_bytes // self.page_bytes
        src, dst = some_pages(num_pages, 3), some_pages(num_pages, 4)
        plan = plan_page_copies(
            PageSide(ready.source.base, src, ready.source.seams()),
            PageSide(ready.target.base, dst, ready.target.seams()),
            self.page_bytes,
        )
        ready.source.engine.submit(peer, *plan).wait(self.timeout)
        sent = pattern(1, self.backed_bytes)
        for s, d in zip(src, dst, strict=True):
            expected[d * self.page_bytes : (d + 1) * self.page_bytes] = sent[
                s * self.page_bytes : (s + 1) * self.page_bytes
            ]
        assert_same_bytes(ready.target.read(0, self.backed_bytes), bytes(expected))

    def test_a_range_of_odd_length_and_alignment_arrives(self, ready: Pair) -> None:
        ready.submit(ready.connect(), (7, 1001, 4099)).wait(self.timeout)
        expected = bytearray(pattern(2, self.backed_bytes))
        expected[1001 : 1001 + 4099] = pattern(1, self.backed_bytes)[7 : 7 + 4099]
        assert_same_bytes(ready.target.read(0, self.backed_bytes), bytes(expected))

    def test_a_transfer_can_be_polled(self, ready: Pair) -> None:
        pending = ready.submit(ready.connect(), (0, 0, self.backed_bytes))
        assert ends(pending, self.timeout)
        assert pending.done()
        assert_same_bytes(ready.target.read(0, self.backed_bytes), pattern(1, self.backed_bytes))

    def test_several_transfers_are_under_way_at_once(self, ready: Pair) -> None:
        peer = ready.connect()
        piece = self.backed_bytes // 8
        for pending in [ready.submit(peer, (i * piece, i * piece, piece)) for i in range(8)]:
            pending.wait(self.timeout)
        assert_same_bytes(ready.target.read(0, self.backed_bytes), pattern(1, self.backed_bytes))

    def test_the_columns_are_the_callers_again_after_submitting(self, ready: Pair) -> None:
        peer, piece = ready.connect(), self.backed_bytes // 4
        first = ready.submit(peer, (piece, piece, 3 * piece))  # so that the next one has to wait
        offsets = np.arange(0, piece, 128)
        src, dst = ready.source.base + offsets, ready.target.base + offsets
        lengths = np.full_like(offsets, 128)
        pending = ready.source.engine.submit(peer, src, dst, lengths)
        src[:], dst[:], lengths[:] = ready.source.base + piece, ready.target.base + piece, 1
        for each in (first, pending):
            each.wait(self.timeout)
        assert_same_bytes(ready.target.read(0, self.backed_bytes), pattern(1, self.backed_bytes))

    def test_more_operations_than_a_batch_takes(self, ready: Pair) -> None:
        limit = ready.source.engine.capabilities.max_batch or 4096
        count = min(limit + 1, self.backed_bytes // 64)
        offsets = list(range(0, count * 64, 64))
        random.Random(5).shuffle(offsets)
        ready.submit(ready.connect(), *((o, o, 32) for o in offsets)).wait(3 * self.timeout)
        expected = np.frombuffer(pattern(2, self.backed_bytes), np.uint8).copy().reshape(-1, 64)
        expected[:count, :32] = np.frombuffer(pattern(1, self.backed_bytes), np.uint8).reshape(-1, 64)[
            :count, :32
        ]
        assert_same_bytes(ready.target.read(0, self.backed_bytes), expected.tobytes())

    def test_an_empty_batch_ends_well(self, ready: Pair) -> None:
        ready.submit(ready.connect()).wait(self.timeout)
        assert_same_bytes(ready.target.read(0, self.backed_bytes), pattern(2, self.backed_bytes))

    def test_lists_of_different_lengths_are_refused(self, ready: Pair) -> None:
        peer = ready.connect()
        with pytest.raises((TransferFailed, ValueError)):
            ready.source.engine.submit(peer, [ready.source.base] * 2, [ready.target.base], [16])

    @pytest.mark.parametrize("odd", [(0, 0, -64), (0, 64 - (1 << 63), 64), (64 - (1 << 63), 0, 64)])
    def test_numbers_that_name_no_bytes_are_refused(self, ready: Pair, odd: tuple[int, int, int]) -> None:
        engine, peer = ready.source.engine, ready.connect()
        src, dst, nbytes = odd
        with pytest.raises((TransferFailed, ValueError)):
            engine.submit(peer, [ready.source.base + src], [ready.target.base + dst], [nbytes]).wait(
                self.timeout
            )
        assert_same_bytes(ready.target.read(0, self.backed_bytes), pattern(2, self.backed_bytes))
        ready.submit(ready.connect(), (0, 0, 64)).wait(self.timeout)

    def test_a_copy_of_no_bytes_changes_nothing(self, ready: Pair) -> None:
        ready.submit(ready.connect(), (0, 4096, 0), (0, 0, 64)).wait(self.timeout)
        expected = pattern(1, self.backed_bytes)[:64] + pattern(2, self.backed_bytes)[64:]
        assert_same_bytes(ready.target.read(0, self.backed_bytes), expected)

    def test_both_sides_send_at_once(self, ready: Pair) -> None:
        half = self.backed_bytes // 2
        pending = ready.submit(ready.connect(), (0, half, half))
        ready.target.write_to(ready.source.describe(), ready.source.base + half, 0, half, self.timeout)
        pending.wait(self.timeout)
        assert_same_bytes(ready.target.read(half, half), pattern(1, self.backed_bytes)[:half])
        assert_same_bytes(ready.source.read(half, half), pattern(2, self.backed_bytes)[:half])

    def test_peers_are_told_apart(self, ready: Pair) -> None:
        """One sender with two receivers, and one receiver with two senders."""
        half, sent = self.backed_bytes // 2, pattern(1, self.backed_bytes)
        with self.another_host() as other:
            other.move_ledger()
            first, second = ready.connect(), ready.source.engine.connect(other.describe())
            assert first != second
            for offset in (0, half // 2):  # now the one, now the other
                src, count = [ready.source.base + offset], [half // 2]
                to_other = ready.source.engine.submit(second, src, [other.base + offset], count)
                ready.submit(first, (half + offset, offset, half // 2)).wait(self.timeout)
                to_other.wait(self.timeout)
            assert_same_bytes(other.read(0, half), sent[:half])
            assert_same_bytes(ready.target.read(0, half), sent[half:])
            other.write_to(ready.target.describe(), ready.target.base, 0, half, self.timeout)
            ready.submit(first, (0, half, half)).wait(self.timeout)
            assert_same_bytes(ready.target.read(0, 2 * half), sent[:half] * 2)
            ready.source.engine.disconnect(second)

    def test_a_peer_that_stands_still_keeps_nobody(self, ready: Pair) -> None:
        """Polling never blocks, and waiting ends in time: well, where no help of the peer is needed."""
        if not isinstance(ready.target, RemoteHost):
            pytest.skip("the peer is in this process, and cannot be stopped without the test")
        peer, ended = ready.connect(), threading.Event()
        ready.submit(peer, (0, 0, 64)).wait(self.timeout)
        pid = ready.target.process.pid

        def look() -> None:
            with contextlib.suppress(TransferFailed, TransferTimeout):
                pending = ready.submit(peer, (0, 0, self.backed_bytes))
                pending.done()
                pending.wait(0.2)
            ended.set()

        os.kill(pid, signal.SIGSTOP)
        try:
            # It stops when each of its threads does, which on a busy machine is after a small transfer.
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            thread = threading.Thread(target=look, daemon=True)
            thread.start()
            assert ended.wait(self.timeout), "it was still waiting"
        finally:
            os.kill(pid, signal.SIGCONT)
            thread.join(self.timeout)
        ready.source.engine.disconnect(peer)
        ready.submit(ready.connect(), (0, 0, self.backed_bytes)).wait(self.timeout)
        assert_same_bytes(ready.target.read(0, self.backed_bytes), pattern(1, self.backed_bytes))

    def test_growth_is_usable_after_connecting_again(self, ready: Pair) -> None:
        first = ready.connect()
        epoch = ready.target.move_ledger(live=True)
        ready.target.grow(self.reserved_bytes)
        assert ready.target.move_ledger(live=True) > epoch
        assert sum(nbytes for _, nbytes in ready.target.registered()) == self.reserved_bytes
        peer = ready.connect()
        assert peer == first
        num_pages = self.backed_bytes // self.page_bytes
        dst = np.arange(num_pages // 2, num_pages // 2 + num_pages)
        plan = plan_page_copies(
            PageSide(ready.source.base, np.arange(num_pages), ready.source.seams()),
            PageSide(ready.target.base, dst, ready.target.seams()),
            self.page_bytes,
        )
        ready.source.engine.submit(peer, *plan).wait(self.timeout)
        start = num_pages // 2 * self.page_bytes
        assert_same_bytes(ready.target.read(start, self.backed_bytes), pattern(1, self.backed_bytes))
        assert_same_bytes(ready.target.read(0, start), pattern(2, self.backed_bytes)[:start])
