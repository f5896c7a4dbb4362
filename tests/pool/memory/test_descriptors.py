"""When no file descriptor is left: one error that names the limit, and nothing taken."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from kvarena.errors import DescriptorLimitError, KvArenaError
from kvarena.pool import HostVmm, descriptor_limits, descriptors_needed

# Its own process: the limit is lowered until nothing can be opened, not even a module.
GROW = """
import os, resource
from kvarena.errors import DescriptorLimitError
from kvarena.pool import Arena, ArenaState, HostVmm, descriptor_limits
from kvarena.pool.errors import DriverError
from kvarena.pool.testing import Resources
driver = HostVmm(granularity=2 << 20, memory_limit=1 << 30)
arena = Arena(driver, 100 * driver.granularity)
arena.back(1)
arena.tensor[0] = 7
os.close(arena.export_fds()[0])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
errors = []
for granules in range(2, 100):
    before = arena.mappings, driver.live_bytes
    try:
        arena.grow(granules * driver.granularity)
    except DescriptorLimitError as error:
        errors.append(error)
        assert (arena.mappings, driver.live_bytes) == before
        assert arena.state is ArenaState.BACKED
        break
assert 10 < granules < 64, granules
assert errors[0].limit == 64, errors
assert "RLIMIT_NOFILE" in str(errors[0]) and "64" in str(errors[0]) and "ulimit" in str(errors[0])
assert descriptor_limits()[0] == 64 and descriptor_limits().left == 0
for step in (arena.export_fds, lambda: arena.back(1)):
    try:
        step()
    except DescriptorLimitError as error:
        errors.append(error)
assert len(errors) == 3, errors
assert arena.mappings == before[0] and int(arena.tensor[0]) == 7
arena.shrink(arena.mappings[-3].offset)
arena.grow(arena.backed_bytes + 1)  # as many as were given back
arena.close()
assert driver.live_bytes == 0
print("done")
"""


def test_growth_to_the_limit_raises_the_typed_error_and_rolls_back() -> None:
    """With a limit of 64, a raw OSError about /proc/meminfo came out of `grow` and ended the worker."""
    child = subprocess.run(
        [sys.executable, "-c", GROW], capture_output=True, text=True, timeout=100, check=False
    )
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr


@pytest.mark.parametrize("name", ["memfd_create", "dup"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_each_limit_is_named_by_what_must_be_raised(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    driver = HostVmm()
    handle = driver.create(driver.granularity)

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, name, refuse)
        with pytest.raises(DescriptorLimitError) as caught:
            driver.create(driver.granularity) if name == "memfd_create" else driver.export_fd(handle)
    assert (caught.value.op, caught.value.code) == (name, errno.errorcode[code])
    assert ("ulimit" if code == errno.EMFILE else "fs.file-max") in str(caught.value)
    assert "RLIMIT_NOFILE" in str(caught.value)
    driver.release(handle)


def test_reading_the_machines_figures_names_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise OSError(errno.EMFILE, "Too many open files", str(self))

    driver = HostVmm(memory_limit=1 << 20)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(DescriptorLimitError, match="RLIMIT_NOFILE"):
        driver.free_bytes()
    with pytest.raises(DescriptorLimitError, match="RLIMIT_NOFILE"):
        driver.create(driver.granularity)
    assert driver.live_bytes == 0


def test_other_failures_are_left_to_the_caller() -> None:
    DescriptorLimitError.raise_for(OSError(errno.EACCES, "no"), "open")
    assert issubclass(DescriptorLimitError, KvArenaError)


def test_limits_are_read_anew_and_a_pools_need_is_told() -> None:
    limits = descriptor_limits()
    assert limits[:2] == resource.getrlimit(resource.RLIMIT_NOFILE)
    ends = os.pipe()
    after = descriptor_limits()
    for fd in ends:
        os.close(fd)
    assert limits.used is not None
    assert after.used == limits.used + 2
    assert limits.left is not None
    assert after.left == limits.left - 2
    assert (descriptors_needed("host", 100), descriptors_needed("cuda", 100)) == (200, 100)
