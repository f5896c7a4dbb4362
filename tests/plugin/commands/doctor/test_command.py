"""The verdict and its exit status, as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.commands.cli import main
from kvarena.plugin.commands.doctor.configuration import refusals
from kvarena.plugin.commands.doctor.device import examine_device
from kvarena.plugin.commands.doctor.findings import Finding, Report
from kvarena.pool import DescriptorLimits, SizingRequest, post_capture_kv_sizing_planned

REFUSES = """
from kvarena.hooks import hookimpl
from kvarena.pool import Refusal

@hookimpl
def kvarena_refusals(request):
    moon = Refusal("full_moon", "MOON_PHASE", "the moon is full")
    return [moon, Refusal("tide", "TIDE", "the tide is high")]
"""


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        status = main(["doctor", "--device", "cpu", "--quick", "--json", *arguments])
        return status, json.loads(capsys.readouterr().out)["findings"]

    return run


def _of(findings: list[dict[str, Any]], topic: str) -> list[dict[str, Any]]:
    return [each for each in findings if each["topic"] == topic]


def test_a_machine_without_a_gpu_gets_a_useful_answer(doctor: Any) -> None:
    status, findings = doctor("--engine", "embedded")
    assert status == 0
    said = " ".join(each["what"] for each in findings)
    assert "handles tried: memfd works" in said
    assert "no GPU here" in said
    assert "embedded: sized after capture, nothing refuses it" in said
    assert _of(findings, "device")[0]["data"]["swapped_in_place"] is True


@pytest.mark.parametrize(("left", "warned"), [(255, True), (256, False), (None, False)])
def test_too_few_descriptors_for_a_pool_that_grows_are_a_warning(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, left: int | None, warned: bool
) -> None:
    limits = DescriptorLimits(None if left is None else left + 10, 4096, 10)
    monkeypatch.setattr("kvarena.plugin.commands.doctor.device.descriptor_limits", lambda: limits)
    status, findings = doctor("--engine", "embedded")
    assert status == 0
    found = [each for each in _of(findings, "device") if "RLIMIT_NOFILE" in each["what"]]
    assert [(each["verdict"], each["data"]["needed"]) for each in found] == [("warning", 256)] * warned
    assert all("255 of 265" in each["what"] and "ulimit -n" in each["fix"] for each in found)


def test_every_reason_of_a_plugin_is_said_and_refuses(doctor: Any, install: Any) -> None:
    install("moon", "1.0", modules={"moon": REFUSES}, entry_points={"moon": "moon"})
    status, findings = doctor("--engine", "embedded")
    assert status == 1
    assert [(each["verdict"], each["data"]) for each in _of(findings, "engine")] == [
        ("refused", {"code": "full_moon", "setting": "MOON_PHASE"}),
        ("refused", {"code": "tide", "setting": "TIDE"}),
    ]
    assert _of(findings, "engine")[0]["fix"] == "Change MOON_PHASE."


def test_every_built_in_reason_has_its_line() -> None:
    request = SizingRequest(
        driver=None,
        unified=False,
        hybrid=False,
        sub_pool_kinds=("mamba",),
        decode_graphs=False,
        prefill_graphs=False,
        memory_saver=True,
        ray=True,
        setting_names={"ray": "--use-ray"},
    )
    reasons = post_capture_kv_sizing_planned(request).refusals
    found = list(refusals("SGLang", reasons))
    assert len(found) == len(reasons) >= 8
    assert "Change --use-ray." in {each.fix for each in found}


def test_bad_settings_are_broken_and_named(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARENA_HEADROM", "1GiB")
    status, findings = doctor()
    assert status == 2
    (settings,) = _of(findings, "settings")
    assert "KVARENA_HEADROM" in settings["what"]
    assert "KVARENA_HEADROOM" in settings["fix"]


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("KVARENA_MEMORY_LIMIT", "raise KVARENA_MEMORY_LIMIT (the demo's --memory-limit)."),
        ("KVARENA_POOL_BYTES", "raise KVARENA_POOL_BYTES."),
    ],
)
def test_a_limit_below_one_request_is_broken_as_in_the_engine_and_names_the_least(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, setting: str, remedy: str
) -> None:
    monkeypatch.setenv(setting, "64KiB")
    status, findings = doctor("--engine", "embedded")
    assert status == 2
    fix = _of(findings, "engine")[-1]["fix"]
    assert fix.endswith(remedy)
    minimum = int(fix.split("The least that works is ")[1].split()[0])
    for limit, expected in ((minimum, 0), (minimum - 1, 2)):
        monkeypatch.setenv(setting, str(limit))
        assert doctor("--engine", "embedded")[0] == expected


def test_a_headroom_above_the_machine_does_not_name_a_limit_that_is_not_set(
    doctor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVARENA_HEADROOM", "900TiB")
    status, findings = doctor("--engine", "embedded")
    assert status == 2
    assert "KVARENA_MEMORY_LIMIT" not in _of(findings, "engine")[-1]["fix"]
    assert "lower KVARENA_HEADROOM" in _of(findings, "engine")[-1]["fix"]


def test_a_directory_of_others_is_named(doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    status, findings = doctor()
    assert status == 0
    assert "chmod 0700" in _of(findings, "settings")[-1]["fix"]
    for name, value in (("KVARENA_TRANSFER", "same-host"), ("KVARENA_SAME_HOST", "1")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert doctor()[0] == 2


def test_sglang_arguments_without_sglang_are_broken(doctor: Any) -> None:
    import importlib.util

    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SGLang is installed here")
    status, findings = doctor("--sglang-args", "--model-path x")
    assert status == 2
    assert "SGLang is not installed, so its arguments cannot be judged" in _of(findings, "sglang")[0]["what"]


@pytest.mark.parametrize("arguments", ["--model-path 'x", "x \\"])
def test_sglang_arguments_that_no_shell_takes_are_bad_input(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", f"--sglang-args={arguments}"])
    assert "is no command line: no " in capsys.readouterr().err


def test_a_cuda_device_that_is_not_there_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert main(["doctor", "--device", "cuda", "--quick", "--json"]) == 2
    (device,) = _of(json.loads(capsys.readouterr().out)["findings"], "device")
    assert "CUDA device" in device["what"] or "NVIDIA driver" in device["what"]
    assert "--device cpu" in device["fix"]


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "cuda:-1"])
def test_a_device_that_is_none_is_bad_input(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--device", device])
    assert "is not a device" in capsys.readouterr().err


def test_on_a_terminal_it_is_one_screen() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvarena.plugin.commands.cli", "doctor", "--device", "cpu", "--quick"],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PATH": "/usr/bin", "COLUMNS": "80"},
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "ready"
    assert len(lines) <= 24
    assert result.stderr == ""


def test_an_h200_in_words() -> None:
    # The figures of facts/gpu.md.
    found = {
        "device": "cuda:0",
        "name": "NVIDIA H200",
        "torch": "2.11.0",
        "driver": "cuda",
        "driver_version": 13000,
        "granularity": 2 << 20,
        "free_bytes": 140 << 30,
        "total_bytes": 141 << 30,
        "rdma_capable": True,
        "handle_types": {"posix_fd": "works", "fabric": "CUDA_ERROR_NOT_PERMITTED"},
        "torch_cache_released": 256 << 20,
        "torch_cache_left": 0,
        "swapped_bytes": 64 << 20,
        "swap_ms": 0.4,
        "swapped_in_place": True,
    }
    said = [(each.verdict, each.what) for each in examine_device(found)]
    assert ("ok", "handles tried: posix_fd works, fabric no (CUDA_ERROR_NOT_PERMITTED)") in said
    assert any("driver for CUDA 13.0" in what and "granularity 2.00 MiB" in what for _, what in said)
    assert any("torch kept 256.00 MiB" in what for _, what in said)
    assert any("gpuDirectRDMACapable" in what for _, what in said)
    assert {verdict for verdict, _ in said} == {"ok"}
    stuck = list(examine_device(found | {"torch_cache_left": 4 << 30}))
    assert [each.verdict for each in stuck if "4.00 GiB" in each.what] == ["warning"]
    moved = list(examine_device(found | {"swapped_in_place": False}))
    assert Report.of(moved).exit_status == 2


def test_the_worst_finding_decides() -> None:
    def status(*verdicts: str) -> int:
        return Report.of(Finding(topic="x", verdict=each, what="") for each in verdicts).exit_status  # type: ignore[arg-type]

    assert status() == status("ok", "note", "warning") == 0
    assert status("ok", "refused") == 1
    assert status("broken", "refused", "ok") == 2
