"""What an `Arena` must do when its driver fails, as a pytest class to derive from."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvarena.pool.arena import Arena, ArenaState
from kvarena.pool.errors import ArenaStateError, DriverError, MappingLeftError
from kvarena.pool.testing import FailingDriver
from kvarena.pool.testing.arena_contract import ArenaFixtures

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["ArenaFaultContract"]


class ArenaFaultContract(ArenaFixtures):
    """Failures at every call, and of their undo: the arena is as before, or BROKEN and can be closed."""

    @pytest.mark.parametrize("step", ["swap", "grow", "shrink", "revert shrink", "shrink to zero"])
    def test_a_failure_at_any_call_changes_nothing(self, driver: FailingDriver, step: str) -> None:
        size = driver.granularity
        steps: dict[str, Callable[[Arena], None]] = {
            "revert shrink": lambda arena: arena.revert_shrink(),
            "swap": lambda arena: arena.back(7 * size),
            "grow": lambda arena: arena.grow(9 * size),
            "shrink": lambda arena: arena.shrink(size),
            "shrink to zero": lambda arena: arena.shrink_to_zero(),
        }
        failures = 0
        for number in range(1, 100):
            with Arena(driver, 16 * size) as arena:
                arena.back(size)
                arena.grow(3 * size)
                arena.grow(4 * size)
                arena.grow(6 * size)
                if step == "revert shrink":
                    arena.shrink(size)
                end = arena.backed_bytes
                arena.tensor[:end] = 8
                before, free = arena.mappings, driver.free_bytes()
                driver.fail_at = number
                try:
                    steps[step](arena)
                except DriverError:
                    failures += 1
                    assert arena.mappings == before
                    assert arena.state is ArenaState.BACKED
                    assert arena.tensor.data_ptr() == arena.base
                    assert int(arena.tensor[:end].min()) == 8
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

    @pytest.mark.parametrize("step", ["back", "grow", "shrink", "revert_shrink"])
    def test_a_mapping_that_a_double_fault_leaves_is_recorded(
        self, driver: FailingDriver, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was left without a record, and the arena said that it was backed."""
        beneath = driver.driver
        if not hasattr(beneath, "_set_access"):
            pytest.skip("this driver has no second step")
        size = driver.granularity
        failing = _Refusals(monkeypatch, beneath)
        arena = Arena(driver, 16 * size)
        arena.back(size)
        arena.grow(2 * size)
        arena.grow(3 * size)
        arena.tensor[: 3 * size] = 4
        if step == "revert_shrink":
            arena.shrink(size)
        if step == "shrink":
            # The second handle cannot be unmapped, and the undo cannot map the third again.
            failing.unmaps = {2, 3}
        else:
            failing.unmaps = {4 if step == "back" else 1}  # "back" unmaps the three old ones first
        failing.accesses = {1}
        with pytest.raises(DriverError) as caught:
            arena.revert_shrink() if step == "revert_shrink" else getattr(arena, step)(
                {"back": 8, "grow": 9, "shrink": 1}[step] * size
            )
        # What went wrong first is raised; in "shrink" that is not the mapping.
        assert isinstance(caught.value, MappingLeftError) == (step != "shrink")
        assert arena.state.value == "broken"
        recorded = [*arena._handles.live, *arena._handles._stale]
        assert [r for r in recorded if r.mapped and not r.accessible]
        mapped = [line for line in driver.outstanding() if line.startswith("mapping")]
        assert len(mapped) == sum(r.mapped for r in recorded)
        assert all(driver.is_mapped(arena.base + r.offset, r.nbytes) for r in recorded if r.mapped)
        assert arena.backed_bytes == sum(mapping.nbytes for mapping in arena.mappings)
        with pytest.raises(ArenaStateError, match=r"broken.*close"):
            arena.grow(9 * size)
        failing.unmaps = failing.accesses = set()
        arena.close()
        assert arena.state is ArenaState.CLOSED

    @pytest.mark.parametrize(
        "step", ["back", "grow", "shrink", "shrink_to_zero", "revert_shrink", "export_fds"]
    )
    @pytest.mark.parametrize("which", [0, 1])
    def test_a_handle_that_something_else_unmapped_is_found(
        self, driver: FailingDriver, step: str, which: int
    ) -> None:
        """`grow` and `export_fds` succeeded, and `close` failed however often it was called."""
        size = driver.granularity
        arena = Arena(driver, 16 * size)
        for end in (1, 2, 4):
            arena.grow(end * size) if arena.backed_bytes else arena.back(end * size)
        if step == "revert_shrink":
            arena.shrink(2 * size)
        gone = arena.mappings[which]
        driver.unmap(arena.base + gone.offset, gone.nbytes)
        sizes = {"back": [8 * size], "grow": [8 * size], "shrink": [size]}
        with pytest.raises(ArenaStateError, match=f"offset {gone.offset} .*not mapped any more"):
            getattr(arena, step)(*sizes.get(step, []))
        assert arena.state.value == "broken"
        assert gone not in arena.mappings
        with pytest.raises(ArenaStateError, match=r"broken.*close"):
            arena.export_fds()
        arena.close()
        assert arena.state is ArenaState.CLOSED

    @pytest.mark.parametrize("unmapped", [False, True])
    @pytest.mark.parametrize("released", [False, True])
    def test_close_ends_whatever_was_let_go_before(
        self, driver: FailingDriver, unmapped: bool, released: bool
    ) -> None:
        if released and driver.name != "host":
            pytest.skip("CUDA may end the process when a handle is released twice")
        size = driver.granularity
        arena = Arena(driver, 16 * size)
        arena.back(size)
        arena.grow(3 * size)
        gone = arena.mappings[1]
        if unmapped:
            driver.unmap(arena.base + gone.offset, gone.nbytes)
        if released:
            driver.release(gone.handle)
        arena.close()
        assert arena.state is ArenaState.CLOSED

    def test_an_export_that_fails_closes_what_it_had_made(self, driver: FailingDriver) -> None:
        size = driver.granularity
        with Arena(driver, 16 * size) as arena:
            arena.back(size)
            arena.grow(2 * size)
            driver._ops = frozenset({"export_fd"})
            driver.fail_at = 2
            with pytest.raises(DriverError, match="INJECTED"):
                arena.export_fds()
            driver.fail_at = None
            assert arena.state is ArenaState.BACKED
            for fd in arena.export_fds():
                os.close(fd)


class _Refusals:
    """Lets the second step of `map`, and what takes a mapping away, fail at chosen calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
        self.accesses: set[int] = set()
        self.unmaps: set[int] = set()
        self._counts = {"_set_access": 0, "_unmap": 0}
        for name in self._counts:
            monkeypatch.setattr(driver, name, self._step(name, getattr(driver, name)))

    def _step(self, name: str, real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def step(address: int, nbytes: int) -> None:
            numbers = self.unmaps if name == "_unmap" else self.accesses
            if numbers:
                self._counts[name] += 1
                if self._counts[name] in numbers:
                    raise DriverError(name, "INJECTED", f"call {self._counts[name]}")
            real(address, nbytes)

        return step
