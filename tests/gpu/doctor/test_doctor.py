"""The doctor on a real GPU, and on the host: what it tries works, and what torch caches is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kvarena.plugin.commands.cli import main

pytestmark = pytest.mark.gpu
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_this_device_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    monkeypatch.setenv("KVARENA_SOCKET_DIR", str(tmp_path / "run"))
    status = main(["doctor", "--device", where, "--engine", "embedded", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    broken = [each["what"] for each in findings if each["verdict"] in ("broken", "refused")]
    assert (status, broken) == (0, [])
    device = next(each["data"] for each in findings if each["topic"] == "device")
    assert device["driver"] == ("cuda" if where == "cuda" else "host")
    same_host = next(each["data"] for each in findings if each["what"].startswith("same-host"))
    assert same_host["arena"]["arrived"] is True
    assert device["swapped_in_place"] is True
    if where == "cpu":
        return
    assert device["handle_types"]["posix_fd"] == "works"
    # The block that the probe freed was in torch's cache, and nothing of it stayed there (vllm#49857).
    assert device["torch_cache_released"] >= 256 << 20
    assert device["torch_cache_left"] == 0
