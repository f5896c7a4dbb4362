"""What an `Arena` must do on any driver, as a pytest class to derive from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from kvarena.pool.arena import Arena, ArenaState
from kvarena.pool.errors import ArenaStateError, DriverError, OutOfMemoryError
from kvarena.pool.testing import FailingDriver, make_driver, no_leaks

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["ArenaContract"]


class ArenaContract:
    """Tests of the arena that hold for every driver."""

    expression: str
    """How to make the driver: a dotted name and a call."""

    @pytest.fixture
    def driver(self) -> Iterator[FailingDriver]:
        """A driver that fails when told to, after a life that pays for whatever comes only once.

        Whatever a test does, nothing may be left of it.
        """
        driver = FailingDriver(make_driver(self.expression))
        with Arena(driver, 4 * driver.granularity) as arena:
            arena.back(driver.granularity)
            arena.tensor[0] = 1
            os.close(arena.export_fds()[0])
        free = driver.free_bytes()
        with no_leaks():
            yield driver
            driver.fail_at = None
        assert driver.outstanding() == []
        # A GPU also loads kernels into its memory when they first run.
        assert free - driver.free_bytes() <= (0 if driver.name == "host" else 256 << 20)

    def test_addresses_come_without_memory(self, driver: Driver) -> None:
        with Arena(driver, 1 << 40) as arena:
            assert (arena.reserved_bytes, arena.backed_bytes, arena.mappings) == (1 << 40, 0, ())
            assert arena.base % driver.granularity == 0
            assert arena.state is ArenaState.RESERVED
            with pytest.raises(ArenaStateError, match="back"):
                _ = arena.tensor

    def test_sizes_are_rounded_to_granules(self, driver: Driver) -> None:
        size = driver.granularity
        with Arena(driver, 3 * size - 1) as arena:
            arena.back(1)
            assert (arena.reserved_bytes, arena.backed_bytes) == (3 * size, size)

    def test_the_second_back_swaps_one_handle_in(self, driver: Driver) -> None:
        size = driver.granularity
        with Arena(driver, 64 * size) as arena:
            arena.back(size)
            sink, tensor, address = arena.mappings[0].handle, arena.tensor, arena.tensor.data_ptr()
            tensor[:size] = 3
            arena.back(8 * size)
            assert [(m.offset, m.nbytes) for m in arena.mappings] == [(0, 8 * size)]
            assert arena.mappings[0].handle != sink
            assert arena.seams == ()
            assert arena.tensor is tensor
            assert tensor.data_ptr() == address == arena.base
            assert int(tensor[: 8 * size].max()) == 0
            tensor[: 8 * size] = 1
            assert int(tensor[: 8 * size].min()) == 1

    def test_growth_appends_and_keeps(self, driver: Driver) -> None:
        size = driver.granularity
        with Arena(driver, 64 * size) as arena:
            arena.back(2 * size)
            arena.tensor[: 2 * size] = 5
            arena.grow(5 * size)
            arena.grow(6 * size - 1)
            assert [(m.offset, m.nbytes) for m in arena.mappings] == [
                (0, 2 * size),
                (2 * size, 3 * size),
                (5 * size, size),
            ]
            assert arena.seams == (arena.base + 2 * size, arena.base + 5 * size)
            assert int(arena.tensor[: 2 * size].min()) == 5
            assert int(arena.tensor[2 * size : 6 * size].max()) == 0
            before = arena.mappings
            arena.grow(3 * size)
            assert arena.mappings == before

    def test_memory_goes_back_in_whole_handles(self, driver: Driver) -> None:
        size = driver.granularity
        with Arena(driver, 64 * size) as arena:
            arena.back(2 * size)
            arena.grow(5 * size)
            arena.grow(9 * size)
            arena.tensor[: 9 * size] = 5
            before = arena.mappings
            with pytest.raises(ArenaStateError, match=f"{2 * size} or {5 * size}"):
                arena.shrink(3 * size)
            with pytest.raises(ArenaStateError, match=str(2 * size)):
                arena.shrink(0)
            with pytest.raises(ArenaStateError, match=str(5 * size)):
                arena.shrink(9 * size)
            assert arena.mappings == before
            arena.shrink(2 * size)
            assert arena.mappings == before[:1]
            assert int(arena.tensor[: 2 * size].min()) == 5
            arena.grow(9 * size)
            assert int(arena.tensor[2 * size : 9 * size].max()) == 0

    def test_sizes_outside_the_reservation_are_refused(self, driver: Driver) -> None:
        size = driver.granularity
        for bad in (0, -1):
            with pytest.raises(ArenaStateError, match=str(bad)):
                Arena(driver, bad)
        with Arena(driver, 4 * size) as arena:
            for step in (partial(arena.back, 0), partial(arena.back, 4 * size + 1)):
                with pytest.raises(ArenaStateError, match=str(4 * size)):
                    step()
            with pytest.raises(ArenaStateError, match="back"):
                arena.grow(size)
            with pytest.raises(ArenaStateError, match="back"):
                arena.shrink(size)
            arena.back(size)
            with pytest.raises(ArenaStateError, match=str(4 * size)):
                arena.grow(5 * size)
            assert arena.backed_bytes == size

    @pytest.mark.parametrize("bad", [True, 4096.0, float("nan"), None, "4096", 2**64, 2**64 + 4096])
    def test_what_is_no_size_is_refused(self, driver: Driver, bad: Any) -> None:
        """The last one was cut to 64 bits on its way to the kernel, and 4096 bytes were reserved."""
        with pytest.raises(ArenaStateError, match=re.escape(repr(bad))):
            Arena(driver, bad)
        size = driver.granularity
        with Arena(driver, 4 * size) as arena:
            arena.back(size)
            arena.grow(2 * size)
            before = arena.mappings
            for step in (arena.back, arena.grow, arena.shrink):
                with pytest.raises(ArenaStateError, match=re.escape(repr(bad))):
                    step(bad)
            assert arena.mappings == before

    def test_out_of_memory_leaves_the_sink_as_it_was(self, driver: Driver) -> None:
        size = driver.granularity
        with Arena(driver, driver.free_bytes() + 4096 * size) as arena:
            arena.back(size)
            arena.tensor[:size] = 7
            before = arena.mappings
            for grab in (arena.back, arena.grow):
                with pytest.raises(OutOfMemoryError):
                    grab(arena.reserved_bytes)
                assert arena.mappings == before
                assert int(arena.tensor[:size].min()) == 7
            arena.back(2 * size)
            assert arena.backed_bytes == 2 * size

    def test_unback_keeps_the_addresses_only(self, driver: Driver) -> None:
        size = driver.granularity
        with Arena(driver, 8 * size) as arena:
            arena.back(size)
            arena.grow(3 * size)
            tensor = arena.tensor
            arena.unback()
            assert (arena.state, arena.backed_bytes, arena.mappings) == (ArenaState.RESERVED, 0, ())
            arena.back(2 * size)
            assert arena.tensor is tensor
            assert int(tensor[: 2 * size].max()) == 0

    def test_closing_twice_is_closing_once(self, driver: FailingDriver) -> None:
        arena = Arena(driver, 4 * driver.granularity)
        arena.back(driver.granularity)
        arena.close()
        calls = len(driver.calls)
        arena.close()
        assert len(driver.calls) == calls
        assert arena.state is ArenaState.CLOSED
        for step in (partial(arena.back, 1), partial(arena.grow, 1), arena.export_fds, arena.unback):
            with pytest.raises(ArenaStateError, match="closed"):
                step()

    def test_exported_descriptors_are_the_handles_in_order(self, driver: Driver) -> None:
        size = driver.granularity
        with Arena(driver, 8 * size) as arena:
            arena.back(size)
            arena.grow(3 * size)
            arena.tensor[:size] = 1
            arena.tensor[size : 3 * size] = 2
            fds = arena.export_fds()
            address = driver.reserve(3 * size)
            for fd, mapping in zip(fds, arena.mappings, strict=True):
                handle = driver.import_fd(fd, mapping.nbytes)
                os.close(fd)
                driver.map(address + mapping.offset, mapping.nbytes, handle)
                driver.release(handle)
            assert driver.tensor(address, 3 * size)[::size].tolist() == [1, 2, 2]
            driver.unmap(address + size, 2 * size)
            driver.unmap(address, size)
            driver.release_reservation(address, 3 * size)

    @pytest.mark.parametrize("step", ["swap", "grow", "shrink", "unback"])
    def test_a_failure_at_any_call_changes_nothing(self, driver: FailingDriver, step: str) -> None:
        size = driver.granularity
        steps: dict[str, Callable[[Arena], None]] = {
            "swap": lambda arena: arena.back(6 * size),
            "grow": lambda arena: arena.grow(9 * size),
            "shrink": lambda arena: arena.shrink(size),
            "unback": lambda arena: arena.unback(),
        }
        failures = 0
        for number in range(1, 100):
            with Arena(driver, 16 * size) as arena:
                arena.back(size)
                arena.grow(3 * size)
                arena.grow(4 * size)
                arena.tensor[: 4 * size] = 8
                before, free = arena.mappings, driver.free_bytes()
                driver.fail_at = number
                try:
                    steps[step](arena)
                except DriverError:
                    failures += 1
                    assert arena.mappings == before
                    assert arena.state is ArenaState.BACKED
                    assert arena.tensor.data_ptr() == arena.base
                    assert int(arena.tensor[: 4 * size].min()) == 8
                    if driver.name == "host":
                        assert driver.driver.free_bytes() == free
                else:
                    # Either no call was left to fail, or one that releases did: the new state stands.
                    assert arena.mappings != before
                counted = driver.counted
                driver.fail_at = None
                arena.back(2 * size)
                assert int(arena.tensor[: 2 * size].max()) == 0
            if counted < number:
                break
        assert failures >= 2
        assert number > failures

    @pytest.mark.parametrize("step", ["back", "grow"])
    def test_a_failing_set_access_changes_nothing(
        self, driver: FailingDriver, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """invergent-ai/surogate#117: what was mapped when a later step failed stayed, unrecorded."""
        beneath = driver.driver
        if not hasattr(beneath, "_set_access"):
            pytest.skip("this driver has no second step")
        size = driver.granularity
        set_access, calls = beneath._set_access, []

        def refuse_once(address: int, nbytes: int) -> None:
            calls.append(nbytes)
            if len(calls) == 1:
                raise DriverError("set_access", "INJECTED")
            set_access(address, nbytes)

        with Arena(driver, 16 * size) as arena:
            arena.back(size)
            arena.tensor[:size] = 6
            before, free = arena.mappings, driver.free_bytes()
            with monkeypatch.context() as patch:
                patch.setattr(beneath, "_set_access", refuse_once)
                with pytest.raises(DriverError, match="INJECTED"):
                    getattr(arena, step)(8 * size)
            assert arena.mappings == before
            assert arena.state is ArenaState.BACKED
            assert int(arena.tensor[:size].min()) == 6
            if driver.name == "host":
                assert driver.free_bytes() == free
            getattr(arena, step)(4 * size)
            assert arena.backed_bytes == 4 * size
            arena.tensor[: 4 * size] = 1

    def test_a_release_that_fails_is_tried_again(self, driver: FailingDriver) -> None:
        size = driver.granularity
        with Arena(driver, 16 * size) as arena:
            arena.back(size)
            fail = FailingDriver(driver, 1, ops=["release"])
            arena._handles._driver = fail
            arena.back(4 * size)
            assert fail.counted == 1
            assert arena.backed_bytes == 4 * size
            arena.grow(5 * size)
            assert fail.counted == 2  # the sink's handle went before the next was made
            assert fail.calls[-4:] == ["release", "create", "map", "zero"]

    def test_a_failing_undo_is_noted_and_breaks_the_arena(self, driver: FailingDriver) -> None:
        size = driver.granularity
        arena = Arena(driver, 16 * size)
        arena.back(size)
        arena._handles._driver = FailingDriver(driver, 1, ops=["map", "zero"], forever=True)
        with pytest.raises(DriverError, match="map") as caught:
            arena.back(4 * size)
        assert any("mapping an old handle again" in note for note in caught.value.__notes__)
        assert (arena.state, arena.mappings) == (ArenaState.BROKEN, ())
        with pytest.raises(ArenaStateError, match=r"broken.*close"):
            arena.back(size)
        arena.close()
        assert arena.state is ArenaState.CLOSED

    @pytest.mark.parametrize("forever", [False, True])
    def test_close_lets_go_of_all_that_it_can(self, driver: FailingDriver, forever: bool) -> None:
        size = driver.granularity
        for number in range(1, 100):
            arena = Arena(driver, 16 * size)
            for end in (1, 2, 4):
                arena.grow(end * size) if arena.backed_bytes else arena.back(end * size)
            failing = FailingDriver(driver, number, forever=forever)
            arena.driver = arena._handles._driver = failing
            failure = None
            try:
                arena.close()
            except DriverError as error:
                failure = error
            if failure is None:
                assert number == 8  # three unmaps, three releases, one reservation
                assert arena.state is ArenaState.CLOSED
                return
            assert arena.state.value == "broken"
            assert f"call {number}" in str(failure)
            # Whatever failed, everything else was tried.
            assert (failing.calls.count("unmap"), failing.calls.count("release")) == (3, 3)
            # Never the addresses beneath what is still mapped.
            mapped = [line for line in driver.outstanding() if line.startswith("mapping")]
            assert ("release_reservation" in failing.calls) == (not mapped)
            failing.fail_at = None
            arena.close()
            assert arena.state is ArenaState.CLOSED
        pytest.fail("close never succeeded")
