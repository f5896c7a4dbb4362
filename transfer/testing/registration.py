"""What registering with an engine must do."""

from __future__ import annotations

import numpy as np
import pytest
from kvarena.transfer.errors import RegistrationError, TransferFailed
from kvarena.transfer.pages.plan import PageSide, plan_page_copies
from kvarena.transfer.testing.memory import assert_same_bytes
from kvarena.transfer.testing.pairs import EnginePairs, Pair, pattern

__all__ = ["RegistrationContract"]


class RegistrationContract(EnginePairs):
    """All or nothing, no overlaps, and what is not registered is not written."""

    def test_a_registration_can_be_taken_back_and_made_again(self, pair: Pair) -> None:
        span = (0, self.backed_bytes)
        for _ in range(3):
            pair.target.register(span)
            pair.target.unregister(span)
        pair.target.register(span)
        pair.source.register(span)
        pair.source.write(0, b"again")
        pair.submit(pair.connect(), (0, 0, 5)).wait(self.timeout)
        assert_same_bytes(pair.target.read(0, 5), b"again")

    @pytest.mark.parametrize("other", ["same", "shorter", "longer", "contained", "overlapping"])
    def test_an_overlap_is_refused_and_the_first_region_stays(self, pair: Pair, other: str) -> None:
        half = self.backed_bytes // 2
        spans = {
            "same": (0, half),
            "shorter": (0, half // 2),
            "longer": (0, 2 * half),
            "contained": (half // 4, half // 4),
            "overlapping": (half // 2, half),
        }
        pair.target.register((0, half))
        with pytest.raises(RegistrationError) as refused:
            pair.target.register(spans[other])
        assert refused.value.region == (pair.target.base + spans[other][0], spans[other][1])
        self._still_usable(pair, 0, half)
        pair.target.unregister((0, half))

    def test_one_call_registers_all_or_nothing(self, pair: Pair) -> None:
        quarter = self.backed_bytes // 4
        pair.target.register((0, quarter))
        with pytest.raises(RegistrationError):
            pair.target.register((2 * quarter, quarter), (quarter // 2, quarter))
        pair.target.register((2 * quarter, quarter))
        with pytest.raises(RegistrationError):
            pair.target.register((3 * quarter, 4096), (3 * quarter, 4096))
        pair.target.register((3 * quarter, 4096))
        self._still_usable(pair, 0, quarter)

    def test_one_call_unregisters_all_or_nothing(self, pair: Pair) -> None:
        quarter = self.backed_bytes // 4
        pair.target.register((0, quarter))
        with pytest.raises(RegistrationError):
            pair.target.unregister((0, quarter), (2 * quarter, quarter))
        with pytest.raises(RegistrationError):
            pair.target.unregister((0, quarter), (0, quarter))
        self._still_usable(pair, 0, quarter)
        pair.target.unregister((0, quarter))
        pair.target.register((0, 2 * quarter))

    def test_adjacent_regions_are_both_usable(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        pair.target.register((0, half), (half, half))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, pattern(1, self.backed_bytes))
        peer = pair.connect()
        pair.submit(peer, (half - 64, half - 64, 64), (half, half, 64)).wait(self.timeout)
        assert_same_bytes(
            pair.target.read(half - 64, 128), pattern(1, self.backed_bytes)[half - 64 : half + 64]
        )

    def test_a_copy_across_a_seam_arrives_or_is_refused(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        pair.target.register((0, half), (half, half))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, pattern(1, self.backed_bytes))
        peer = pair.connect()
        try:
            pair.submit(peer, (half - 64, half - 64, 128)).wait(self.timeout)
        except TransferFailed:
            assert not pair.source.engine.capabilities.crosses_seams
            assert_same_bytes(pair.target.read(half, 64), bytes(64))
        else:
            assert_same_bytes(
                pair.target.read(half - 64, 128), pattern(1, self.backed_bytes)[half - 64 : half + 64]
            )

    def test_pages_arrive_though_each_side_has_other_seams(self, pair: Pair) -> None:
        pages = self.backed_bytes // self.page_bytes
        borders = {pair.source: (5, pages // 2 + 1), pair.target: (3, pages // 3, pages - 7)}
        seams = []
        for host, inside in borders.items():
            ends = [border * self.page_bytes + 4096 for border in inside] + [self.backed_bytes]
            starts = [0, *ends[:-1]]
            host.register(*((start, end - start) for start, end in zip(starts, ends, strict=True)))
            seams.append([host.base + start for start in starts[1:]])
        pair.source.write(0, pattern(1, self.backed_bytes))
        ids = np.arange(pages - 1)
        plan = plan_page_copies(
            PageSide(pair.source.base, ids, seams[0]),
            PageSide(pair.target.base, ids + 1, seams[1]),
            self.page_bytes,
        )
        pair.source.engine.submit(pair.connect(), *plan).wait(self.timeout)
        sent = pattern(1, self.backed_bytes)[: -self.page_bytes]
        assert_same_bytes(pair.target.read(0, self.backed_bytes), bytes(self.page_bytes) + sent)

    @pytest.mark.parametrize("unknown", ["never", "inside", "longer", "shorter"])
    def test_what_was_not_registered_is_not_unregistered(self, pair: Pair, unknown: str) -> None:
        half = self.backed_bytes // 2
        spans = {
            "never": (half, half),
            "inside": (4096, half - 4096),
            "longer": (0, 2 * half),
            "shorter": (0, 4096),
        }
        pair.target.register((0, half))
        with pytest.raises(RegistrationError) as refused:
            pair.target.unregister(spans[unknown])
        assert refused.value.unknown
        self._still_usable(pair, 0, half)
        pair.target.unregister((0, half))

    def test_an_empty_region_is_refused(self, pair: Pair) -> None:
        with pytest.raises(RegistrationError):
            pair.target.register((0, 0))
        pair.target.register((0, self.backed_bytes))

    def test_memory_that_is_not_backed_is_never_registered(self, pair: Pair) -> None:
        with pytest.raises(RegistrationError, match="past backed"):
            pair.target.move_ledger(nbytes=self.reserved_bytes, past_backed="refuse")
        assert pair.target.registered() == []
        pair.target.move_ledger(nbytes=self.reserved_bytes)
        assert sum(nbytes for _, nbytes in pair.target.registered()) == self.backed_bytes
        if pair.source.engine.capabilities.detects_unmapped:
            with pytest.raises(RegistrationError):
                pair.target.register((self.backed_bytes, self.reserved_bytes - self.backed_bytes))

    def test_a_write_outside_what_is_registered_is_refused(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        pair.target.register((0, half))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, b"x" * self.backed_bytes)
        peer = pair.connect()
        with pytest.raises(TransferFailed):
            pair.submit(peer, (0, half, 4096)).wait(self.timeout)
        assert_same_bytes(pair.target.read(half, half), bytes(half))

    @pytest.mark.parametrize("end", ["head", "tail"])
    def test_a_write_that_is_partly_outside_is_refused(self, pair: Pair, end: str) -> None:
        quarter = self.backed_bytes // 4
        pair.target.register((quarter, quarter))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, b"x" * 128)
        offset = quarter - 64 if end == "head" else 2 * quarter - 64
        with pytest.raises(TransferFailed):
            pair.submit(pair.connect(), (0, offset, 128)).wait(self.timeout)
        outside = offset if end == "head" else 2 * quarter
        assert_same_bytes(pair.target.read(outside, 64), bytes(64))

    def test_a_batch_of_which_one_write_is_outside_is_refused(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        pair.target.register((0, half))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, b"x" * 64)
        with pytest.raises(TransferFailed):
            pair.submit(pair.connect(), (0, 0, 64), (0, half + 64, 64), (0, 64, 64)).wait(self.timeout)
        assert_same_bytes(pair.target.read(half, half), bytes(half))

    def test_a_region_that_was_replaced_by_a_longer_one_is_usable(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        for host in (pair.source, pair.target):
            host.register((0, half))
        pair.source.write(0, pattern(1, self.backed_bytes))
        pair.submit(pair.connect(), (0, 0, half)).wait(self.timeout)
        for host in (pair.source, pair.target):
            host.unregister((0, half))
            host.register((0, self.backed_bytes))
        pair.submit(pair.connect(), (0, 0, self.backed_bytes)).wait(self.timeout)
        assert_same_bytes(pair.target.read(0, self.backed_bytes), pattern(1, self.backed_bytes))

    def test_a_tail_that_was_taken_back_is_not_written(self, pair: Pair) -> None:
        half = self.backed_bytes // 2
        pair.target.register((0, half), (half, half))
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, pattern(1, self.backed_bytes))
        pair.submit(pair.connect(), (0, 0, 64), (0, half, 64)).wait(self.timeout)
        pair.target.unregister((half, half))
        with pytest.raises(TransferFailed):
            pair.submit(pair.connect(), (64, half, 64)).wait(self.timeout)
        assert_same_bytes(pair.target.read(half, 64), pattern(1, self.backed_bytes)[:64])
        pair.submit(pair.connect(), (64, 0, 64)).wait(self.timeout)
        assert_same_bytes(pair.target.read(0, 64), pattern(1, self.backed_bytes)[64:128])

    def test_what_a_sender_registers_after_connecting_can_be_sent(self, pair: Pair) -> None:
        """Who grows alone has no news for the peer, and gets none: nobody connects again."""
        half = self.backed_bytes // 2
        pair.target.register((0, self.backed_bytes))
        pair.source.register((0, half))
        pair.source.write(0, pattern(1, self.backed_bytes))
        peer = pair.connect()
        pair.submit(peer, (0, 0, half)).wait(self.timeout)
        pair.source.register((half, half))
        pair.submit(peer, (half, half, half)).wait(self.timeout)
        assert_same_bytes(pair.target.read(0, self.backed_bytes), pattern(1, self.backed_bytes))

    def test_nothing_is_written_after_unregistering(self, ready: Pair) -> None:
        ready.connect()
        ready.target.move_ledger(nbytes=0)
        with pytest.raises(TransferFailed):
            ready.submit(ready.connect(), (0, 0, 4096)).wait(self.timeout)
        assert_same_bytes(ready.target.read(0, self.backed_bytes), pattern(2, self.backed_bytes))

    def _still_usable(self, pair: Pair, offset: int, nbytes: int) -> None:
        """A write to the first and last bytes of the span arrives."""
        pair.source.register((0, self.backed_bytes))
        pair.source.write(0, pattern(1, 128))
        peer = pair.connect()
        last = offset + nbytes - 64
        pair.submit(peer, (0, offset, 64), (64, last, 64)).wait(self.timeout)
        assert_same_bytes(pair.target.read(offset, 64) + pair.target.read(last, 64), pattern(1, 128))
