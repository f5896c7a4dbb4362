"""A child that crashes, hangs or is wrong is an answer, never the doctor's end."""

from __future__ import annotations

import os
import signal
import time

import pytest
from kvarena.plugin.commands.doctor.child import Child, ChildFailed


def test_a_crash_is_told_with_its_signal() -> None:
    with Child("transfer_probe", ["send", "same-host", "cpu", "4096", "/nonexistent"]) as child:
        os.kill(child._process.pid, signal.SIGSEGV)
        with pytest.raises(ChildFailed, match="was killed by SIGSEGV"):
            child.answer(60)


def test_a_child_that_hangs_is_ended() -> None:
    with Child("transfer_probe", ["send", "same-host", "cpu", "4096", "/nonexistent"]) as child:
        os.kill(child._process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ChildFailed, match=r"no answer within 0\.5 s"):
            child.answer(0.5)
        assert child._process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 60


def test_a_traceback_is_told_by_its_last_lines() -> None:
    with (
        Child("transfer_probe", ["send"]) as child,
        pytest.raises(ChildFailed, match=r"status 1.*ValueError"),
    ):
        child.answer(60)


def test_an_error_of_ours_is_passed_on() -> None:
    with (
        Child("transfer_probe", ["send", "no-such-engine", "cpu", "65536", "/tmp"]) as child,
        pytest.raises(ChildFailed, match="no plugin provides the transfer engine no-such-engine"),
    ):
        child.answer(60)


def test_closing_leaves_no_process() -> None:
    child = Child("device_probe", ["cpu"])
    assert child.answer(60)["driver"] == "host"
    child.close()
    child.close()
    assert child._process.returncode is not None
