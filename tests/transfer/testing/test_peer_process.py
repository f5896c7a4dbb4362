"""The other process of a test pair, when it does not answer."""

from __future__ import annotations

import os
import signal

import pytest
from kvarena.transfer import RecordingEngine
from kvarena.transfer.testing import HostMemory, PeerProcess, RemoteHost, Standalone


def test_one_that_does_not_answer_in_time_is_killed_and_answers_nobody_else() -> None:
    process = PeerProcess()
    try:
        host = RemoteHost(process, Standalone(RecordingEngine), HostMemory, 1 << 20, 1 << 20)
        host.register((0, 4096))
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="did not answer registered"):
            process.call("registered", timeout=0.1)
        assert not process.alive
        with pytest.raises((EOFError, OSError)):
            process.call("read", 0, 8)
    finally:
        process.close()
