"""The doctor on a real GPU: what it tries works, and what torch caches is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kvarena.plugin.commands.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.timeout(600)
def test_this_gpu_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVARENA_SOCKET_DIR", str(tmp_path / "run"))
    status = main(["doctor", "--device", "cuda", "--engine", "embedded", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    broken = [each["what"] for each in findings if each["verdict"] in ("broken", "refused")]
    assert (status, broken) == (0, [])
    device = next(each["data"] for each in findings if each["topic"] == "device")
    assert device["driver"] == "cuda"
    assert device["handle_types"]["posix_fd"] == "works"
    assert device["swapped_in_place"] is True
    # The block that the probe freed was in torch's cache, and nothing of it stayed there (vllm#49857).
    assert device["torch_cache_released"] >= 256 << 20
    assert device["torch_cache_left"] == 0
    same_host = next(each["data"] for each in findings if each["what"].startswith("same-host"))
    assert same_host["arena"]["arrived"] is True
