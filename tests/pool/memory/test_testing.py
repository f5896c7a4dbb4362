"""The tools that other tests trust."""

from __future__ import annotations

import os

import pytest
from kvarena.pool import DriverError, HostVmm
from kvarena.pool.testing import FailingDriver, LeakError, make_driver, no_leaks


def test_the_failing_call_does_not_reach_the_driver() -> None:
    driver = FailingDriver(HostVmm(), 2)
    size = driver.granularity
    address = driver.reserve(size)
    with pytest.raises(DriverError, match=r"create failed with INJECTED: call 2") as caught:
        driver.create(size)
    assert (caught.value.op, caught.value.code) == ("create", "INJECTED")
    handle = driver.create(size)
    assert driver.calls == ["reserve", "create", "create"]
    assert len(driver.outstanding()) == 2
    driver.release(handle)
    driver.release_reservation(address, size)
    assert driver.outstanding() == []


def test_only_the_named_calls_count_and_the_error_can_be_chosen() -> None:
    driver = FailingDriver(HostVmm(), 1, ops=["zero"], error=OSError("told to"), forever=True)
    driver.release(driver.create(driver.granularity))
    for _ in range(2):
        with pytest.raises(OSError, match="told to"):
            driver.zero(0, 0)
    driver.fail_at = None
    driver.release(driver.create(driver.granularity))
    with pytest.raises(ValueError, match="zeroo"):
        FailingDriver(HostVmm(), ops=["zeroo"])


def test_it_answers_as_what_it_stands_on() -> None:
    beneath = HostVmm(granularity=2 << 20)
    driver = FailingDriver(FailingDriver(beneath))
    assert (driver.name, driver.granularity, driver.rdma_capable) == ("host", 2 << 20, True)
    assert driver.device == beneath.device


def test_leaks_are_named() -> None:
    driver = make_driver("kvarena.pool.HostVmm()")
    with pytest.raises(LeakError, match="memfd:kvarena"), no_leaks():
        handle = driver.create(driver.granularity)
    driver.release(handle)
    with pytest.raises(LeakError, match="pipe"), no_leaks():
        ends = os.pipe()
    for fd in ends:
        os.close(fd)
    with no_leaks():
        os.close(os.dup(0))
