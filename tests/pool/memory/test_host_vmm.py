"""What is particular to the host driver: its limit, its faults, its bookkeeping."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvarena.pool import Arena, DescriptorLimitError, DriverError, HostVmm, OutOfMemoryError
from kvarena.pool.testing import mapped_within, no_leaks

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize(
    "touch",
    [
        "ctypes.memset(base + 2 * size, 1, 1)",
        "ctypes.string_at(base + 2 * size, 1)",
        "driver.unmap(base, size); ctypes.memset(base, 1, 1)",
        "driver.unmap(base, size); driver.release_reservation(base, 4 * size); ctypes.memset(base, 1, 1)",
    ],
    ids=["write", "read", "unmapped", "released"],
)
def test_bytes_without_memory_fault(touch: str) -> None:
    code = f"""
import ctypes
from kvarena.pool.host_vmm import HostVmm
driver = HostVmm()
size = driver.granularity
base = driver.reserve(4 * size)
driver.map(base, size, driver.create(size))
ctypes.memset(base, 1, size)
print("backed", flush=True)
{touch}
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.stdout == "backed\n", child.stderr
    assert child.returncode == -signal.SIGSEGV


def test_what_aligning_a_reservation_took_is_given_back() -> None:
    driver = HostVmm(granularity=1 << 30)
    addresses = Path("/proc/self/statm")
    before = int(addresses.read_text().split()[0])
    for _ in range(8):
        base = driver.reserve(1 << 30)
        assert base % (1 << 30) == 0
        driver.release_reservation(base, 1 << 30)
    assert (int(addresses.read_text().split()[0]) - before) * PAGE < 1 << 29


def test_descriptors_that_run_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostVmm()
    handle = driver.create(PAGE)
    fd = driver.export_fd(handle)

    def full(fd: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", full)
        for step in (lambda: driver.export_fd(handle), lambda: driver.import_fd(fd, PAGE)):
            with pytest.raises(DescriptorLimitError, match=r"dup failed.*RLIMIT_NOFILE") as caught:
                step()
            assert str(caught.value.limit) in str(caught.value)
    assert driver.live_bytes == PAGE
    imported = driver.import_fd(fd, PAGE)
    os.close(fd)
    driver.release(imported)
    driver.release(handle)


def test_memory_is_committed_when_a_handle_is_made() -> None:
    driver = HostVmm()
    handle = driver.create(64 * PAGE)
    fd = driver.export_fd(handle)
    assert os.fstat(fd).st_blocks * 512 == 64 * PAGE
    os.close(fd)
    driver.release(handle)


@pytest.mark.parametrize("bad", [0, -PAGE, PAGE + 1, float(PAGE), True, None, "4096", 2**64 + PAGE])
def test_a_size_that_is_none_is_refused(bad: Any) -> None:
    # ctypes passes on the lower 64 bits: 2**64 + 4096 reserved 4096 bytes, and was noted as more.
    driver = HostVmm()
    for take in (driver.reserve, driver.create):
        with pytest.raises(DriverError):
            take(bad)
    assert (driver._reservations, driver.live_bytes) == ({}, 0)


def test_a_peer_cannot_cut_the_memory_away() -> None:
    driver = HostVmm()
    handle = driver.create(4 * PAGE)
    fd = driver.export_fd(handle)
    for size in (0, 8 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    driver.release(handle)


def test_the_limit_counts_what_is_mapped_though_released() -> None:
    driver = HostVmm(memory_limit=10 * PAGE)
    handle = driver.create(6 * PAGE)
    base = driver.reserve(6 * PAGE)
    driver.map(base, 6 * PAGE, handle)
    driver.release(handle)
    assert driver.free_bytes() == 4 * PAGE
    with pytest.raises(OutOfMemoryError, match="4096 too few") as caught:
        driver.create(5 * PAGE)
    assert (caught.value.requested, caught.value.free) == (5 * PAGE, 4 * PAGE)
    driver.unmap(base, 6 * PAGE)
    assert driver.free_bytes() == 10 * PAGE
    driver.release_reservation(base, 6 * PAGE)


def test_imported_memory_is_the_exporters() -> None:
    owner, guest = HostVmm(memory_limit=4 * PAGE), HostVmm(memory_limit=4 * PAGE)
    handle = owner.create(4 * PAGE)
    fd = owner.export_fd(handle)
    other = guest.import_fd(fd, 4 * PAGE)
    os.close(fd)
    assert (owner.free_bytes(), guest.free_bytes()) == (0, 4 * PAGE)
    guest.release(other)
    owner.release(handle)


def test_a_limit_between_granules_is_rounded_down() -> None:
    driver = HostVmm(memory_limit=10 * PAGE + 5)
    assert driver.free_bytes() == 10 * PAGE
    driver.release(driver.create(driver.free_bytes()))
    assert HostVmm(memory_limit=PAGE - 1).free_bytes() == 0


def test_the_machine_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarena.pool.host_vmm.available_bytes", lambda: 3 * PAGE + 1)
    assert HostVmm().free_bytes() == 3 * PAGE
    assert HostVmm(memory_limit=1 << 50).free_bytes() == 3 * PAGE
    with pytest.raises(OutOfMemoryError):
        HostVmm(memory_limit=1 << 50).create(4 * PAGE)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EIO])
def test_memory_that_runs_out_in_the_middle_is_given_back(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    driver = HostVmm(memory_limit=64 * PAGE)

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, no_leaks():
        patch.setattr("os.posix_fallocate", refuse)
        with pytest.raises(DriverError, match=errno.errorcode[code]) as caught:
            driver.create(8 * PAGE)
    assert isinstance(caught.value, OutOfMemoryError) == (code != errno.EIO)
    assert driver.free_bytes() == 64 * PAGE


def test_addresses_that_the_kernel_has_not() -> None:
    with pytest.raises(DriverError, match=r"mmap failed with ENOMEM: \d+ bytes"):
        HostVmm().reserve(1 << 60)


@pytest.mark.parametrize("granularity", [PAGE, 2 << 20, 1 << 30])
def test_a_reservation_is_aligned_and_goes_wholly(granularity: int) -> None:
    driver = HostVmm(granularity=granularity)
    address = driver.reserve(3 * granularity)
    assert address % granularity == 0
    lines = mapped_within(address, 3 * granularity)
    assert lines
    assert all(" ---p " in line for line in lines)
    count = len(Path("/proc/self/maps").read_text().splitlines())
    driver.release_reservation(address, 3 * granularity)
    assert mapped_within(address, 3 * granularity) == []
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= count


@pytest.mark.parametrize("granularity", [0, -PAGE, PAGE // 2, 3 * PAGE, PAGE + 1])
def test_odd_granularities_are_refused(granularity: int) -> None:
    with pytest.raises(DriverError, match=rf"granularity is {granularity}\."):
        HostVmm(granularity=granularity)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(DriverError, match="memory_limit is -1"):
        HostVmm(memory_limit=-1)


class TestMisuse:
    """Each is refused by name, and what was there still works and goes away."""

    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (lambda d, base, h: d.create(PAGE + 1), "granularity"),
            (lambda d, base, h: d.create(0), "granularity"),
            (lambda d, base, h: d.reserve(PAGE - 1), "granularity"),
            (lambda d, base, h: d.map(base + 1, PAGE, h), "multiple"),
            (lambda d, base, h: d.map(base + 4 * PAGE, PAGE, h), "not in one reservation"),
            (lambda d, base, h: d.map(base + 3 * PAGE, 2 * PAGE, h), "has 4096 bytes"),
            (lambda d, base, h: d.map(base, PAGE, h), "already mapped"),
            (lambda d, base, h: d.map(base + PAGE, PAGE, h + 99), "does not exist"),
            (lambda d, base, h: d.unmap(base + PAGE, PAGE), "not one mapped handle"),
            (lambda d, base, h: d.unmap(base, 2 * PAGE), "not one mapped handle"),
            (lambda d, base, h: d.release(h + 99), "does not exist"),
            (lambda d, base, h: d.export_fd(h + 99), "does not exist"),
            (lambda d, base, h: d.release_reservation(base, 4 * PAGE), "still mapped"),
            (lambda d, base, h: d.release_reservation(base, PAGE), "not one reservation"),
            (lambda d, base, h: d.zero(base, PAGE + 1), "1 bytes at .* have no memory"),
            (lambda d, base, h: d.zero(base - 1, 2), "have no memory"),
            (lambda d, base, h: d.import_fd(999999, PAGE), "EBADF"),
        ],
    )
    def test_refused(self, step: Callable[[HostVmm, int, int], object], message: str) -> None:
        driver = HostVmm(memory_limit=64 * PAGE)
        with no_leaks():
            base, handle = driver.reserve(4 * PAGE), driver.create(PAGE)
            driver.map(base, PAGE, handle)
            with pytest.raises(DriverError, match=message):
                step(driver, base, handle)
            driver.zero(base, PAGE)
            driver.unmap(base, PAGE)
            driver.release(handle)
            driver.release_reservation(base, 4 * PAGE)
        assert driver.free_bytes() == 64 * PAGE

    def test_a_handle_is_released_once(self) -> None:
        driver = HostVmm()
        first = driver.create(PAGE)
        driver.release(first)
        second = driver.create(PAGE)
        with pytest.raises(DriverError, match="was released"):
            driver.release(first)
        driver.release(second)

    def test_imports_are_checked(self) -> None:
        driver = HostVmm()
        handle = driver.create(2 * PAGE)
        fd = driver.export_fd(handle)
        unsealed = os.memfd_create("other", os.MFD_CLOEXEC)
        os.ftruncate(unsealed, PAGE)
        with no_leaks():
            with pytest.raises(DriverError, match="has 8192 bytes, 4096 were expected"):
                driver.import_fd(fd, PAGE)
            with pytest.raises(DriverError, match="truncated"):
                driver.import_fd(unsealed, PAGE)
        os.close(unsealed)
        os.close(fd)
        driver.release(handle)


def test_a_closed_arena_leaves_no_mapping_and_no_descriptor() -> None:
    driver = HostVmm()
    with no_leaks():
        arena = Arena(driver, 1 << 30)
        arena.back(1)
        arena.back(64 * PAGE)
        arena.grow(65 * PAGE)
        span = (arena.base, arena.reserved_bytes)
        assert len(mapped_within(*span)) == 3
        arena.close()
        assert mapped_within(*span) == []
    assert driver.live_bytes == 0


def test_a_failing_set_access_leaves_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostVmm()
    base, handle = driver.reserve(4 * PAGE), driver.create(PAGE)

    def refuse(address: int, nbytes: int) -> None:
        raise DriverError("mprotect", "ENOMEM")

    monkeypatch.setattr(driver, "_set_access", refuse)
    with no_leaks(), pytest.raises(DriverError, match="mprotect"):
        driver.map(base, PAGE, handle)
    assert [line.split()[1] for line in mapped_within(base, 4 * PAGE)] == ["---p"]
    driver.release(handle)
    driver.release_reservation(base, 4 * PAGE)
