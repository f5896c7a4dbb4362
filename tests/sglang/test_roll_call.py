"""A server of two nodes of which one has no kvarena, over SGLang's own world group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.sglang

GRANULE = 4096  # the sink


@pytest.mark.timeout(400)
def test_a_rank_that_is_alone_says_so_and_builds_nothing(sglang: Any, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    program = Path(__file__).with_name("two_ranks.py")
    done = subprocess.run(
        [sys.executable, str(program), sglang.version, str(tmp_path)],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    missed = second.pop(0)
    assert "Of 2 ranks, 0 did not begin to size their pools after capture within 3 s" in missed["error"]
    assert "KVARENA_ENABLE=1" in missed["error"]
    assert first == second == [{"error": "", "backed": GRANULE}]
