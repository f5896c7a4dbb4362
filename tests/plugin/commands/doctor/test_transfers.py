"""Engines are moved real bytes with, between two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.commands.doctor import transfers
from kvarena.plugin.commands.doctor.findings import Finding
from kvarena.plugin.commands.doctor.transfers import _finding, examine_engine, ucx_path

ENGINE = """
import os
from kvarena.hooks import hookimpl
from kvarena.transfer import RecordingEngine

class Odd(RecordingEngine):
    {body}

@hookimpl
def kvarena_transfer_engines(config):
    return [Odd(name="odd")] if "odd" in config.engines else []
"""

LIES = """
    def submit(self, peer, src, dst, lengths): return self
    def connect(self, description): return "anybody"
    def done(self): return True
    def wait(self, timeout=None): return None
"""

# Printed by UCX 1.20 (NIXL 1.5.1) between two processes here; the second table on an H200's VMM memory.
TABLES = """
[17959.1] [vm:1:0]   | kvarena-8e3d95eef089438bb0707d0 self cfg#0               |
[17959.1] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[17959.1] [vm:1:0]   +--------+-------------+-----------------------------------+
[17959.1] [vm:1:0]   | Range  | Description |              Config               |
[17959.1] [vm:1:0]   | 0..inf | zero-copy   | self/memory                       |
[17959.1] [vm:1:1]   | kvarena-8e3d95eef089438bb0707d0 intra-node cfg#1         |
[17959.1] [vm:1:1]   | active message by ucp_am_send* from host memory  |
[17959.1] [vm:1:1]   | 16516..inf | multi-frag copy-in | tcp/lo         |
[17959.1] [vm:1:1]   | kvarena-8e3d95eef089438bb0707d0 intra-node cfg#1         |
[17959.1] [vm:1:1]   | remote memory write by ucp_put*(multi) from cuda memory |
[17959.1] [vm:1:1]   | 0..2047 | short | tcp/lo |
[17959.1] [vm:1:1]   | 2048..inf | (?) software emulation | tcp/lo |
"""


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transfers._BYTES, "cpu", 4 << 20)


def _examine(name: str, **kwargs: Any) -> list[Finding]:
    return list(examine_engine(name, "cpu", **{"wanted": False} | kwargs))


def test_what_was_not_tried_is_not_called_installed() -> None:
    (finding,) = _examine("same-host", quick=True)
    assert finding.what == "same-host is installed, and was not tried"
    (finding,) = _examine("pigeon", quick=True, wanted=True)
    assert finding.what == "pigeon was not tried"


def test_same_host_moves_an_arena() -> None:
    (finding,) = _examine("same-host")
    assert (finding.verdict, finding.fix) == ("ok", "")
    assert "over mapped handles" in finding.what
    arena = finding.data["arena"]
    assert arena["arrived"] is True
    assert arena["gb_per_s"] > 0
    assert arena["pages_gb_per_s"] > 0


def test_same_host_is_tried_where_its_sockets_will_lie(tmp_path: Path) -> None:
    # A socket's path may have 107 bytes. A TMPDIR of any length is none of its business.
    deep = tmp_path / ("d" * 120)
    (finding,) = _examine("same-host", directory=deep)
    assert finding.verdict == "warning"  # nobody has asked for it
    assert "107 are the most" in finding.what
    (finding,) = _examine("same-host", directory=deep, wanted=True)
    assert finding.verdict == "broken"


def test_a_long_temporary_directory_harms_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ("d" * 120)).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("d" * 120)))
    (finding,) = _examine("same-host", directory=tmp_path / "run")
    assert (finding.verdict, finding.fix) == ("ok", "")


def test_mooncake_moves_ordinary_memory_and_an_arena() -> None:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    (finding,) = _examine("mooncake")
    assert finding.verdict in ("ok", "warning"), finding
    assert finding.data["plain"]["arrived"] is finding.data["arena"]["arrived"] is True
    assert "mooncake-transfer-engine" in finding.what


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("def register(self, regions): os.abort()", "was killed by SIGABRT"),
        ("def connect(self, description): raise RuntimeError('no route')", "RuntimeError: no route"),
    ],
    ids=["crash", "exception"],
)
def test_an_engine_that_fails_is_survived_and_named(install: Any, body: str, why: str) -> None:
    install(
        "odd", "1.0", modules={"odd_engine": ENGINE.format(body=body)}, entry_points={"odd": "odd_engine"}
    )
    (finding,) = _examine("odd", wanted=True)
    assert finding.verdict == "broken"
    assert why in finding.what


def test_an_engine_that_lies_is_found_out(install: Any) -> None:
    # It reports every write as done, and writes nothing.
    install(
        "odd", "1.0", modules={"odd_engine": ENGINE.format(body=LIES)}, entry_points={"odd": "odd_engine"}
    )
    (finding,) = _examine("odd")
    assert finding.verdict == "broken"
    assert "the bytes did not arrive" in finding.what


def test_two_mooncakes_are_named_with_the_cure(install: Any) -> None:
    install("mooncake-transfer-engine", "0.3.13")
    install("mooncake-transfer-engine-cuda13", "0.3.14")
    (finding,) = _examine("mooncake")
    assert finding.verdict == "broken"
    assert "mooncake-transfer-engine 0.3.13, mooncake-transfer-engine-cuda13 0.3.14" in finding.what
    assert "Uninstall all of them" in finding.fix


def test_two_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    two = (("mooncake-transfer-engine-non-cuda", "0.3.13"), ("mooncake-transfer-engine", "0.3.13"))
    monkeypatch.setattr("kvarena.plugin.commands.doctor.transfers.installed_variants", lambda: two)
    (finding,) = _examine("mooncake", quick=True)
    assert finding.verdict == "broken"
    assert "installed together" in finding.what


def test_a_missing_library_is_named_with_its_package(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvarena.plugin.commands.doctor.transfers.installed_variants",
        lambda: (("mooncake-transfer-engine-non-cuda", "0.3.13"),),
    )
    broken = 'raise ImportError("libibverbs.so.1: cannot open shared object file")'
    install("shadow", "0", modules={"mooncake.__init__": "", "mooncake.engine": broken})
    (finding,) = _examine("mooncake", wanted=True)
    assert finding.verdict == "broken"
    assert "apt-get install libibverbs1" in finding.what


@pytest.mark.parametrize(("wanted", "verdict"), [(False, "note"), (True, "broken")])
def test_what_is_not_installed_is_broken_only_if_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, verdict: str
) -> None:
    monkeypatch.setattr("kvarena.plugin.commands.doctor.transfers.installed_variants", lambda: ())
    (finding,) = _examine("mooncake", wanted=wanted)
    assert (finding.verdict, finding.what) == (verdict, "mooncake is not installed")
    assert ("kvarena[mooncake-cpu]" in finding.fix) is wanted


def test_quick_tries_nothing() -> None:
    (finding,) = _examine("same-host", quick=True)
    assert (finding.verdict, finding.data) == ("note", {})


def test_falling_off_the_fast_path_is_a_warning_with_the_way_out() -> None:
    # As measured on an H200 (facts/gpu.md): VMM memory without a fabric handle.
    def measured(plain: float, arena: float, path: str) -> dict[str, Any]:
        one = {"pages_gb_per_s": 0.1, "arrived": True}
        return {"plain": one | {"gb_per_s": plain}, "arena": one | {"gb_per_s": arena}, "path": path}

    def verdict(name: str, *args: Any, on_gpu: bool = True) -> Finding:
        return _finding(f"{name} 1.0", name, measured(*args), on_gpu=on_gpu)

    slow = verdict("nixl", 862, 0.44, "software emulation, tcp/lo")
    assert slow.verdict == "warning"
    assert "0.44 GB/s" in slow.what
    assert "862 GB/s" in slow.what
    assert "KVARENA_TRANSFER=same-host" in slow.fix
    assert verdict("nixl", 862, 0.44, "").verdict == "warning"
    assert verdict("nixl", 5.1, 1.0, "").verdict == "warning"
    assert verdict("nixl", 4.9, 1.0, "").verdict == "ok"
    assert verdict("nixl", 1.3, 0.2, "zero-copy, cma/memory", on_gpu=False).verdict == "ok"
    assert verdict("mooncake", 1.8, 1.4, "").verdict == "ok"


def test_ucx_says_which_path_it_takes_to_a_peer() -> None:
    assert ucx_path(TABLES) == "(?) software emulation, tcp/lo"
    assert ucx_path(TABLES.partition("intra-node")[0]) == ""
    assert ucx_path("") == ""
