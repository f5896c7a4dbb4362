"""Engines with one fault each; a docstring begins with the test of the contract that must find it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from kvarena.transfer import Addresses, Region, RegistrationError, TransferFailed
from kvarena_example_engine import SocketEngine


class Overlaps(SocketEngine):
    """test_an_overlap_is_refused_and_the_first_region_stays: it looks at nothing."""

    def register(self, regions: Sequence[Region]) -> None:
        self._regions.update({region.address: region for region in regions})


class Half(SocketEngine):
    """test_one_call_registers_all_or_nothing: it keeps what it took before it refused."""

    def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            super().register([region])


class Loses(SocketEngine):
    """test_one_call_registers_all_or_nothing: a refusal costs it everything."""

    def register(self, regions: Sequence[Region]) -> None:
        try:
            super().register(regions)
        except RegistrationError:
            self._regions = {} if len(regions) > 1 else self._regions
            raise


class Empty(SocketEngine):
    """test_an_empty_region_is_refused: it takes one."""

    def register(self, regions: Sequence[Region]) -> None:
        super().register([region for region in regions if region.nbytes])


class ByAddress(SocketEngine):
    """test_what_was_not_registered_is_not_unregistered: any length will do."""

    def unregister(self, regions: Sequence[Region]) -> None:
        super().unregister([self._regions.get(region.address, region) for region in regions])


class Truncates(SocketEngine):
    """test_a_range_of_odd_length_and_alignment_arrives: it copies whole words."""

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Any:
        return super().submit(peer, src, dst, [int(length) // 16 * 16 for length in lengths])


class Generous(SocketEngine):
    """test_a_write_that_is_partly_outside_is_refused: it lets a write run past its region."""

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self._regions = {a: Region(a, r.nbytes + 64 * (r in regions)) for a, r in self._regions.items()}


class SaysYes(SocketEngine):
    """test_a_write_outside_what_is_registered_is_refused: it reports a refusal as success."""

    def _send(self, connection: Any, peer: str, operations: list[tuple[int, int, int]]) -> None:
        try:
            super()._send(connection, peer, operations)
        except TransferFailed as error:
            if "outside" not in error.why:
                raise


class SkipsBadOnes(SocketEngine):
    """test_a_batch_of_which_one_write_is_outside_is_refused: the others hide it."""

    def _send(self, connection: Any, peer: str, operations: list[tuple[int, int, int]]) -> None:
        try:
            super()._send(connection, peer, operations)
        except TransferFailed:
            if len(operations) == 1:
                raise


class Keeps(SocketEngine):
    """test_a_tail_that_was_taken_back_is_not_written: what is adjacent to a region stays open."""

    def unregister(self, regions: Sequence[Region]) -> None:
        super().unregister(regions)
        for region in regions:
            for held in tuple(self._regions.values()):
                if held.end == region.address:
                    self._regions[held.address] = Region(held.address, held.nbytes + region.nbytes)


class Snapshot(SocketEngine):
    """test_what_a_sender_registers_after_connecting_can_be_sent: it knows its own regions of then."""

    _then: tuple[Region, ...] = ()

    def connect(self, description: bytes) -> str:
        self._then = tuple(self._regions.values())
        return super().connect(description)

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Any:
        for source in src:
            if not any(region.address <= source < region.end for region in self._then):
                raise TransferFailed(self.name, peer, None, "not registered here")
        return super().submit(peer, src, dst, lengths)


class LastPeer(SocketEngine):
    """test_peers_are_told_apart: it writes to whom it met last."""

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Any:
        return super().submit(next(reversed(self._peers), peer), src, dst, lengths)


class OneAtATime(SocketEngine):
    """test_peers_are_told_apart: it hears its first sender only."""

    _hearing = False

    def _receive(self, connection: Any) -> None:
        if self._hearing:
            connection.close()
            return
        self._hearing = True
        super()._receive(connection)


class OneWay(SocketEngine):
    """test_both_sides_send_at_once: who may be written to cannot write."""

    _is_target = False

    def describe(self) -> bytes:
        self._is_target = True
        return super().describe()

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Any:
        if self._is_target:
            raise TransferFailed(self.name, peer, None, "a target")
        return super().submit(peer, src, dst, lengths)


class Lenient(SocketEngine):
    """test_numbers_that_name_no_bytes_are_refused: it takes less than nothing as nothing."""

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Any:
        return super().submit(peer, src, dst, [max(0, int(length)) for length in lengths])


class Borrows(SocketEngine):
    """test_the_columns_are_the_callers_again_after_submitting: it looks at them when it comes to it."""

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Any:
        pending = super().submit(peer, [], [], [])
        connection, sender = self._peers[peer]

        def later() -> None:
            time.sleep(0.5)  # longer than a busy machine may keep the caller from using its columns
            self._send(connection, peer, [*zip(map(int, src), map(int, dst), map(int, lengths), strict=True)])

        pending._future = sender.submit(later)
        return pending


class Patient(SocketEngine):
    """test_a_peer_that_stands_still_keeps_nobody: it waits for ever."""

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Any:
        pending = super().submit(peer, src, dst, lengths)
        wait = pending.wait
        pending.wait = lambda timeout=None: wait()  # type: ignore[method-assign]
        return pending


class Early(SocketEngine):
    """test_written_pages_arrive_and_no_other_byte_changes: it is done before it is."""

    def _send(self, connection: Any, peer: str, operations: list[tuple[int, int, int]]) -> None:
        time.sleep(1)
        super()._send(connection, peer, operations)

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Any:
        pending = super().submit(peer, src, dst, lengths)
        pending.wait = lambda timeout=None: None  # type: ignore[method-assign]
        return pending


class Leaks(SocketEngine):
    """test_peers_that_were_disconnected_leave_nothing: a thread stays of each connection."""

    def disconnect(self, peer: str) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        super().disconnect(peer)


class Lingers(SocketEngine):
    """test_an_engine_closes_though_a_peer_is_connected: it lets its peers go first."""

    def close(self) -> None:
        while any(thread.is_alive() for thread in self._threads[1:]):  # each hears one of them
            time.sleep(0.01)
        super().close()


ALL = SocketEngine.__subclasses__()
