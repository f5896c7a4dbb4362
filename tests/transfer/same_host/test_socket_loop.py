"""The thread that serves an engine's sockets."""

from __future__ import annotations

import os

import pytest
from kvarena.transfer.same_host.channel import SocketLoop


@pytest.mark.parametrize("how", ["call", "later"])
def test_who_calls_a_loop_that_has_ended_writes_to_nobodys_file(how: str) -> None:
    """It wakes the loop through a descriptor, whose number is another file's after the end."""
    loop = SocketLoop("ended")
    loop.close()
    files = [os.memfd_create("other") for _ in range(8)]  # these get the numbers that were freed
    try:
        getattr(loop, how)(lambda: None)
        assert [os.fstat(file).st_size for file in files] == [0] * 8
    finally:
        for file in files:
            os.close(file)
