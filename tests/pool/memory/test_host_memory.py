"""What the machine and the control groups leave, read from trees of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvarena.pool._host_memory import available_bytes

KIB = 1024
MACHINE = 500 * KIB

V1 = "32 31 0:29 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
V2 = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = "42 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


class Tree:
    """A root directory with a process in one control group."""

    def __init__(self, root: Path, mounts: str, cgroup: str) -> None:
        self.root = root
        self._write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:    500 kB\n")
        self._write("proc/self/mountinfo", f"22 1 0:1 / / rw - ext4 /dev/sda rw\n{mounts}\n")
        self._write("proc/self/cgroup", f"5:devices:/\n{cgroup}\n")

    def v1(self, group: str, limit: int, used: int, cache: int = 0) -> None:
        """Limit a group of version 1."""
        self._write(f"{group}/memory.limit_in_bytes", f"{limit}\n")
        self._write(f"{group}/memory.usage_in_bytes", f"{used}\n")
        self._write(f"{group}/memory.stat", f"inactive_file 7\ntotal_inactive_file {cache}\n")

    def v2(self, group: str, limit: int | str, used: int, cache: int = 0) -> None:
        """Limit a group of version 2."""
        self._write(f"{group}/memory.max", f"{limit}\n")
        self._write(f"{group}/memory.current", f"{used}\n")
        self._write(f"{group}/memory.stat", f"anon 5\ninactive_file {cache}\n")

    def _write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


def test_without_control_groups_the_kernels_estimate_counts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 500 kB\n")
    assert available_bytes(tmp_path) == MACHINE
    (tmp_path / "proc/meminfo").write_text("MemFree: 500 kB\n")
    with pytest.raises(ValueError, match="MemAvailable"):
        available_bytes(tmp_path)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_limit_counts_at_any_depth_of_version_2(tmp_path: Path, depth: int) -> None:
    tree = Tree(tmp_path, V2, "0::/pod/box/task")
    groups = ["sys/fs/cgroup", "sys/fs/cgroup/pod", "sys/fs/cgroup/pod/box", "sys/fs/cgroup/pod/box/task"]
    for group in groups[1:]:  # the root of version 2 has no such files
        tree.v2(group, "max", 1000)
    assert available_bytes(tmp_path) == MACHINE
    tree.v2(groups[depth], 5000, 1000, cache=300)
    assert available_bytes(tmp_path) == 4300
    tree.v2(groups[depth], 400, 1000)
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_limit_counts_at_any_depth_of_version_1(tmp_path: Path, depth: int) -> None:
    tree = Tree(tmp_path, f"{V1}\n{HYBRID}", "4:cpu,memory:/pod/box\n0::/")
    groups = ["sys/fs/cgroup/memory", "sys/fs/cgroup/memory/pod", "sys/fs/cgroup/memory/pod/box"]
    for group in groups:
        tree.v1(group, 9223372036854771712, 1000)  # what version 1 says for "none"
    assert available_bytes(tmp_path) == MACHINE
    tree.v1(groups[depth], 6000, 1000, cache=200)
    assert available_bytes(tmp_path) == 5200


def test_the_tightest_of_several_limits_counts(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2, "0::/pod/box")
    tree.v2("sys/fs/cgroup/pod", 9000, 8000)  # its other members have used it up
    tree.v2("sys/fs/cgroup/pod/box", 5000, 1000)
    assert available_bytes(tmp_path) == 1000


def test_a_container_sees_its_own_group_as_the_mount(tmp_path: Path) -> None:
    """Without a namespace of its own, its path begins with what is mounted; with one, it is the root."""
    mount = "32 31 0:29 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    tree = Tree(tmp_path, mount, "4:memory:/docker/abc/inner")
    tree.v1("sys/fs/cgroup/memory", 7000, 1000)
    tree.v1("sys/fs/cgroup/memory/inner", 6500, 1000)
    assert available_bytes(tmp_path) == 5500
    for path in ("/docker/other", "/../../moved"):
        (tmp_path / "proc/self/cgroup").write_text(f"4:memory:{path}\n")
        assert available_bytes(tmp_path) == 6000


def test_a_limit_counts_though_nothing_tells_of_the_cache(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2, "0::/pod")
    tree.v2("sys/fs/cgroup/pod", 5000, 1000, cache=300)
    (tmp_path / "sys/fs/cgroup/pod/memory.stat").write_text("anon 5\n")
    assert available_bytes(tmp_path) == 4000
    (tmp_path / "sys/fs/cgroup/pod/memory.stat").unlink()
    assert available_bytes(tmp_path) == 4000


def test_a_group_that_ends_meanwhile_or_reads_oddly_sets_no_limit(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2, "0::/pod/gone\nnot a line")
    tree.v2("sys/fs/cgroup/pod", "lots", 1000)
    assert available_bytes(tmp_path) == MACHINE
