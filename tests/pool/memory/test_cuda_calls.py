"""The CUDA driver's own steps around a recorded API, so that none of them is run first on a GPU."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
from kvarena.errors import DescriptorLimitError
from kvarena.pool import CudaVmm, DriverError, MappingLeftError, OutOfMemoryError, UnknownHandleError
from kvarena.pool import _cuda_api as cuda

SIZE = 2 << 20


class Api:
    """Records calls, and answers the ones that are told to fail with a code."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.codes: dict[str, str] = {}

    def call(self, name: str, *args: Any, detail: str = "") -> Any:
        self.calls.append(name)
        if name in self.codes:
            raise DriverError(name, f"CUDA_ERROR_{self.codes[name]}", detail)
        return (5 * SIZE, 9 * SIZE) if name == "cuMemGetInfo" else 7


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    api = Api()
    monkeypatch.setattr(cuda, "call", api.call)
    return api


@pytest.fixture
def driver(api: Api) -> CudaVmm:
    driver = object.__new__(CudaVmm)
    driver.granularity = SIZE
    driver._context = driver._access = driver._prop = None
    driver._fd_type = SimpleNamespace()
    driver.cached_bytes_released = 0
    return driver


def test_a_mapping_that_fails_halfway_is_undone(api: Api, driver: CudaVmm) -> None:
    api.codes = {"cuMemSetAccess": "INVALID_DEVICE"}
    with pytest.raises(DriverError, match="cuMemSetAccess failed with CUDA_ERROR_INVALID_DEVICE"):
        driver.map(SIZE, SIZE, 3)
    assert api.calls == ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"]


def test_a_mapping_whose_undo_fails_is_told(api: Api, driver: CudaVmm) -> None:
    api.codes = {"cuMemSetAccess": "UNKNOWN", "cuMemUnmap": "ILLEGAL_ADDRESS"}
    with pytest.raises(MappingLeftError, match=r"cuMemUnmap failed.*after: cuMemSetAccess failed") as caught:
        driver.map(SIZE, SIZE, 3)
    assert caught.value.code == "CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.mark.parametrize("code", [None, "INVALID_VALUE", "ILLEGAL_ADDRESS"])
def test_what_is_mapped_is_asked_of_the_driver(api: Api, driver: CudaVmm, code: str | None) -> None:
    api.codes = {} if code is None else {"cuMemRetainAllocationHandle": code}
    if code == "ILLEGAL_ADDRESS":
        with pytest.raises(DriverError, match=code):
            driver.is_mapped(SIZE, SIZE)
    else:
        assert driver.is_mapped(SIZE, SIZE) == (code is None)
    # What was retained is released again.
    assert api.calls.count("cuMemRelease") == (code is None)


def test_only_a_handle_that_does_not_exist_counts_as_unknown(api: Api, driver: CudaVmm) -> None:
    driver.release(3)
    for code, kind in (("INVALID_VALUE", UnknownHandleError), ("ILLEGAL_ADDRESS", DriverError)):
        api.codes = {"cuMemRelease": code}
        with pytest.raises(DriverError, match="handle 0x3") as caught:
            driver.release(3)
        assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("step", "op"),
    [
        (lambda driver: driver.create(SIZE), "cuMemCreate"),
        (lambda driver: driver.export_fd(3), "cuMemExportToShareableHandle"),
        (lambda driver: driver.import_fd(4, SIZE), "cuMemImportFromShareableHandle"),
    ],
    ids=["create", "export", "import"],
)
@pytest.mark.parametrize("limit_reached", [False, True])
def test_a_call_for_want_of_descriptors_is_told_from_others(
    api: Api, driver: CudaVmm, monkeypatch: pytest.MonkeyPatch, step: Any, op: str, limit_reached: bool
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    api.codes = {op: "OPERATING_SYSTEM"}
    with monkeypatch.context() as patched:
        if limit_reached:
            patched.setattr(os, "open", full)
        with pytest.raises((DescriptorLimitError, DriverError)) as caught:
            step(driver)
    assert isinstance(caught.value, DescriptorLimitError) == limit_reached
    assert f"{op} " in str(caught.value)
    assert "OPERATING_SYSTEM" in str(caught.value)


def test_a_created_and_an_exported_handle_are_what_the_driver_answers(
    api: Api, driver: CudaVmm, monkeypatch: pytest.MonkeyPatch
) -> None:
    inheritable: dict[int, bool] = {}
    monkeypatch.setattr(os, "set_inheritable", inheritable.__setitem__)
    assert (driver.create(SIZE), driver.export_fd(3), driver.import_fd(4, SIZE)) == (7, 7, 7)
    assert inheritable == {7: False}


def test_out_of_memory_has_its_numbers(api: Api, driver: CudaVmm, monkeypatch: pytest.MonkeyPatch) -> None:
    api.codes = {"cuMemCreate": "OUT_OF_MEMORY"}
    monkeypatch.setattr(driver, "release_cached", lambda: 1)
    with pytest.raises(OutOfMemoryError) as caught:
        driver.create(6 * SIZE)
    assert (caught.value.requested, caught.value.free) == (6 * SIZE, 5 * SIZE)
    assert api.calls.count("cuMemCreate") == 2  # again, once torch had let go of its cache
    assert driver.free_bytes() == 3 * SIZE
