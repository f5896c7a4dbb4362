"""What any `Driver` must do, as a pytest class: derive from it to test one of yours.

::

    class TestMine(DriverContract):
        expression = "mypackage.MyDriver()"
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from kvarena.pool.errors import DriverError, MappingLeftError, OutOfMemoryError
from kvarena.pool.testing import make_driver

if TYPE_CHECKING:
    from kvarena.pool.driver import Driver

__all__ = ["DriverContract"]

_CHILD = """
import sys
from kvarena.pool.testing import make_driver
driver, fd, nbytes = make_driver(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
handle = driver.import_fd(fd, nbytes)
address = driver.reserve(nbytes)
driver.map(address, nbytes, handle)
span = driver.tensor(address, nbytes)
assert span[:16].tolist() == list(range(16)), span[:16]
span[-16:] = 7
driver.unmap(address, nbytes)
driver.release(handle)
driver.release_reservation(address, nbytes)
"""


class DriverContract:
    """Tests that hold for every driver."""

    expression: str
    """How to make the driver, here and in another process: a dotted name and a call."""

    @pytest.fixture
    def driver(self) -> Driver:
        """A driver of its own for each test."""
        return make_driver(self.expression)

    @pytest.fixture
    def span(self, driver: Driver) -> Iterator[int]:
        """Addresses of four granules, given back whatever the test left mapped there."""
        nbytes = 4 * driver.granularity
        address = driver.reserve(nbytes)
        yield address
        driver.release_reservation(address, nbytes)

    def test_mapped_memory_is_written_and_read(self, driver: Driver, span: int) -> None:
        size = 2 * driver.granularity
        handle = driver.create(size)
        driver.map(span, size, handle)
        tensor = driver.tensor(span, 4 * driver.granularity)
        assert tensor.data_ptr() == span
        assert tensor.numel() == 4 * driver.granularity
        tensor[:size] = 9
        driver.zero(span + 3, size - 5)
        assert tensor[:4].tolist() == [9, 9, 9, 0]
        assert tensor[size - 3 : size].tolist() == [0, 9, 9]
        assert int(tensor[:size].ne(0).sum()) == 5
        _drop(driver, span, size, handle)

    def test_fresh_memory_is_zero_if_the_driver_says_so(self, driver: Driver, span: int) -> None:
        size = driver.granularity
        for _ in range(2):
            handle = driver.create(size)
            driver.map(span, size, handle)
            if not driver.fresh_is_zero:
                driver.zero(span, size)
            tensor = driver.tensor(span, size)
            assert int(tensor.max()) == 0
            tensor.fill_(255)
            _drop(driver, span, size, handle)

    def test_contents_stay_with_the_handle(self, driver: Driver, span: int) -> None:
        size = driver.granularity
        first, second = driver.create(size), driver.create(size)
        tensor = None
        for handle, value in ((first, 1), (second, 2)):
            driver.map(span, size, handle)
            tensor = driver.tensor(span, size)
            tensor.fill_(value)
            driver.unmap(span, size)
        assert tensor is not None
        driver.map(span, size, first)
        driver.map(span + size, size, second)
        both = driver.tensor(span, 2 * size)
        assert both[::size].tolist() == [1, 2]
        _drop(driver, span, size, first)
        _drop(driver, span + size, size, second)

    def test_a_released_handle_lives_while_it_is_mapped(self, driver: Driver, span: int) -> None:
        size = driver.granularity
        handle = driver.create(size)
        driver.map(span, size, handle)
        driver.release(handle)
        tensor = driver.tensor(span, size)
        tensor.fill_(5)
        assert int(tensor.sum()) == 5 * size
        driver.unmap(span, size)

    def test_free_bytes_follow_the_handles(self, driver: Driver) -> None:
        _needs_room_of_its_own(driver)
        size = 32 * driver.granularity
        driver.release(driver.create(size))  # whatever the first one costs for good
        before = driver.free_bytes()
        handle = driver.create(size)
        taken = before - driver.free_bytes()
        driver.release(handle)
        assert taken == size
        assert driver.free_bytes() == before

    def test_all_that_is_free_can_be_taken_at_once(self, driver: Driver) -> None:
        _needs_room_of_its_own(driver)
        handle = driver.create(driver.free_bytes())
        driver.release(handle)

    def test_out_of_memory_has_its_numbers_and_takes_nothing(self, driver: Driver) -> None:
        before = driver.free_bytes()
        wanted = (before // driver.granularity + 1024) * driver.granularity
        with pytest.raises(OutOfMemoryError, match=str(wanted)) as caught:
            driver.create(wanted)
        assert caught.value.requested == wanted
        assert 0 < caught.value.free < wanted
        assert driver.free_bytes() > before - 32 * driver.granularity

    def test_only_whole_handles_are_mapped_and_unmapped(self, driver: Driver, span: int) -> None:
        size = 2 * driver.granularity
        handle = driver.create(size)
        with pytest.raises(DriverError):
            driver.map(span, size // 2, handle)
        with pytest.raises(DriverError):
            driver.map(span, 2 * size, handle)
        driver.map(span, size, handle)
        with pytest.raises(DriverError):
            driver.unmap(span, size // 2)
        with pytest.raises(DriverError, match="bytes at"):
            driver.map(span, size, handle)
        tensor = driver.tensor(span, size)
        tensor.fill_(1)
        assert int(tensor.sum()) == size
        _drop(driver, span, size, handle)

    def test_what_is_mapped_is_told(self, driver: Driver, span: int) -> None:
        size = driver.granularity
        handle = driver.create(size)
        assert not driver.is_mapped(span, size)
        driver.map(span + size, size, handle)
        assert [driver.is_mapped(span + at, size) for at in (0, size, 2 * size)] == [False, True, False]
        driver.release(handle)  # asking holds nothing, and a mapping needs no handle
        assert driver.is_mapped(span + size, size)
        driver.unmap(span + size, size)
        assert not driver.is_mapped(span + size, size)

    def test_a_mapping_that_cannot_be_undone_is_told(
        self, driver: Driver, span: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not hasattr(driver, "_set_access"):
            pytest.skip("this driver has no second step")
        size = driver.granularity
        handle = driver.create(size)

        def refuse(address: int, nbytes: int) -> None:
            raise DriverError("second step", "INJECTED", f"{nbytes} bytes at {address:#x}")

        with monkeypatch.context() as patch:
            patch.setattr(driver, "_set_access", refuse)
            patch.setattr(driver, "_unmap", refuse)
            with pytest.raises(MappingLeftError, match=r"INJECTED.*after: second step failed"):
                driver.map(span, size, handle)
        assert driver.is_mapped(span, size)
        _drop(driver, span, size, handle)
        assert not driver.is_mapped(span, size)

    def test_a_failing_set_access_maps_nothing(
        self, driver: Driver, span: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not hasattr(driver, "_set_access"):
            pytest.skip("this driver has no second step")
        size = driver.granularity
        handle = driver.create(size)

        def refuse(address: int, nbytes: int) -> None:
            raise DriverError("set_access", "INJECTED")

        with monkeypatch.context() as patch:
            patch.setattr(driver, "_set_access", refuse)
            with pytest.raises(DriverError, match="INJECTED"):
                driver.map(span, size, handle)
        # CUDA refuses to map over a mapping that was left behind.
        driver.map(span, size, handle)
        driver.tensor(span, size).fill_(3)
        _drop(driver, span, size, handle)

    def test_a_handle_travels_to_another_process(self, driver: Driver, span: int) -> None:
        size = driver.granularity
        handle = driver.create(size)
        driver.map(span, size, handle)
        tensor = driver.tensor(span, size)
        driver.zero(span, size)
        tensor[:16] = tensor.new_tensor(list(range(16)))
        fd = driver.export_fd(handle)
        assert not os.get_inheritable(fd)
        assert tensor[:16].tolist() == list(range(16))  # and so the device is done
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, self.expression, str(fd), str(size)],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        os.close(fd)
        assert child.returncode == 0, child.stderr
        assert tensor[-16:].tolist() == [7] * 16
        _drop(driver, span, size, handle)

    def test_an_imported_handle_outlives_the_exported_one(self, driver: Driver, span: int) -> None:
        size = driver.granularity
        handle = driver.create(size)
        driver.map(span, size, handle)
        driver.tensor(span, size).fill_(4)
        fd = driver.export_fd(handle)
        _drop(driver, span, size, handle)
        other = driver.import_fd(fd, size)
        os.close(fd)
        driver.map(span, size, other)
        assert int(driver.tensor(span, size).sum()) == 4 * size
        _drop(driver, span, size, other)

    def test_a_descriptor_of_something_else_is_refused(self, driver: Driver) -> None:
        read, write = os.pipe()
        try:
            with pytest.raises(DriverError):
                driver.import_fd(read, driver.granularity)
        finally:
            os.close(read)
            os.close(write)


def _needs_room_of_its_own(driver: Driver) -> None:
    if driver.name == "host" and getattr(driver, "memory_limit", None) is None:
        pytest.skip("the memory of this machine has other users")


def _drop(driver: Driver, address: int, nbytes: int, handle: int) -> None:
    driver.unmap(address, nbytes)
    driver.release(handle)
