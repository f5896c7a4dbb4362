"""The pair on two GPUs: pages go from one card to the other, and the tokens are those of one process.

The same test runs once on the host, so that it never runs first on a GPU.
"""

from __future__ import annotations

import json

import pytest
import torch
from kvarena.plugin.commands.cli import main
from kvarena.transfer import EngineUnavailable

pytestmark = pytest.mark.gpu


def _needs(transfer: str, prefill: str) -> None:
    if prefill != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device, or none")
    try:
        if transfer == "mooncake":
            from kvarena.transfer import MooncakeEngine

            MooncakeEngine("127.0.0.1").close()
        elif transfer == "nixl":
            from kvarena.transfer.nixl.install import load_nixl

            load_nixl()
    except EngineUnavailable as error:
        pytest.skip(str(error))


CARDS = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")]
RUNS = [("same-host", ("cpu", "cpu"))] + [
    (transfer, cards) for transfer in ("mooncake", "nixl", "same-host") for cards in CARDS
]


@pytest.mark.parametrize(("transfer", "cards"), RUNS)
def test_demo(capsys: pytest.CaptureFixture[str], transfer: str, cards: tuple[str, str]) -> None:
    prefill, decode = cards
    _needs(transfer, prefill)
    options = ["--device", prefill, "--transfer", transfer]
    if decode != prefill:
        options += ["--decode-device", decode]
    status = main(["demo", "--json", *options])
    report = json.loads(capsys.readouterr().out)

    assert report["problems"] == []
    assert status == 0
    assert all(request["equal"] for request in report["requests"])
    assert {role: report["processes"][role]["device"] for role in ("prefill", "decode")} == {
        "prefill": prefill,
        "decode": decode,
    }
    moved = report["processes"]["prefill"]["transfers"][transfer]
    assert moved["submitted"] >= len(report["requests"])
    assert moved["failed"] == 0
