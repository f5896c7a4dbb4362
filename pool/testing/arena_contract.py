"""What an `Arena` must do on any driver, as a pytest class to derive from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from kvarena.pool.arena import Arena, ArenaState
from kvarena.pool.errors import ArenaStateError, OutOfMemoryError
from kvarena.pool.testing import FailingDriver, make_driver, no_leaks

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["ArenaContract", "ArenaFixtures"]


class ArenaFixtures:
    """What both contracts of the arena stand on."""

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


class ArenaContract(ArenaFixtures):
    """What an arena does where nothing fails."""

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

    def test_memory_is_released_in_whole_handles(self, driver: Driver) -> None:
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

    def test_a_shrink_can_be_taken_back_handle_by_handle(self, driver: Driver) -> None:
        """`grow` joined them, and sizes that were legal before were refused."""
        size = driver.granularity
        with Arena(driver, 64 * size) as arena:
            arena.back(2 * size)
            with pytest.raises(ArenaStateError, match="nothing to take back"):
                arena.revert_shrink()
            for end in (5, 9, 10):
                arena.grow(end * size)
            arena.tensor[: 10 * size] = 5
            before = [(m.offset, m.nbytes) for m in arena.mappings]
            arena.shrink(2 * size)
            arena.revert_shrink()
            assert [(m.offset, m.nbytes) for m in arena.mappings] == before
            assert int(arena.tensor[: 2 * size].min()) == 5
            assert int(arena.tensor[2 * size : 10 * size].max()) == 0
            with pytest.raises(ArenaStateError, match="nothing to take back"):
                arena.revert_shrink()
            arena.shrink(9 * size)
            arena.shrink(5 * size)  # only the last one is taken back
            arena.revert_shrink()
            assert arena.backed_bytes == 9 * size
            forgotten: list[Callable[[], None]] = [
                lambda: arena.grow(10 * size),
                lambda: arena.back(3 * size),
                arena.shrink_to_zero,
            ]
            for change in forgotten:
                arena.shrink(arena.mappings[-1].offset) if len(arena.mappings) > 1 else None
                change()
                with pytest.raises(ArenaStateError, match="take"):
                    arena.revert_shrink()

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
    def test_what_is_not_a_size_is_refused(self, driver: Driver, bad: Any) -> None:
        """The last one was truncated to 64 bits on its way to the kernel, and 4096 bytes were reserved."""
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

    def test_shrinking_to_zero_keeps_the_addresses_only(self, driver: Driver) -> None:
        size = driver.granularity
        with Arena(driver, 8 * size) as arena:
            arena.back(size)
            arena.grow(3 * size)
            tensor = arena.tensor
            arena.shrink_to_zero()
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
        for step in (
            partial(arena.back, 1),
            partial(arena.grow, 1),
            arena.export_fds,
            arena.shrink_to_zero,
            arena.revert_shrink,
        ):
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
