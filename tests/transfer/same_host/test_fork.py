"""A forked child has an engine's descriptors, but none of its threads; it must not matter to anyone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvarena.transfer import RegistrationError, TransferFailed
from kvarena.transfer.testing import RemoteHost, assert_same_bytes
from same_host_support import MIB, ArenaMemory, MakeEngine, SameHost, a_lease

# From 3.12 on Python warns of a fork beside threads, which is what is tried here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a child that does this: 0, or 1 if it raises."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def open_files() -> set[str]:
    """What this process has descriptors of; each socket has a number there."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_a_child_that_closes_the_engine_ends_nothing_of_the_parent(
    sender: SameHost, receiver: RemoteHost
) -> None:
    peer = sender.engine.connect(receiver.describe())
    receiver.process.call("connect", sender.describe())
    path = sender.engine.socket_path
    assert in_child(sender.engine.close) == 0
    assert path.is_socket()
    sender.engine.submit(peer, [sender.base], [receiver.base], [MIB]).wait(10)
    assert_same_bytes(receiver.read(0, MIB), sender.read(0, MIB))
    assert sender.engine.attached == ("receiver",)


def test_a_child_that_calls_the_loop_writes_to_nobodys_file(sender: SameHost) -> None:
    """The numbers of the descriptors that the child let go are those of the files that it opens."""

    def work() -> None:
        files = [os.memfd_create("other") for _ in range(8)]
        sender.engine._loop.later(lambda: None)
        assert [os.fstat(file).st_size for file in files] == [0] * 8

    assert in_child(work) == 0


def test_in_a_child_the_engine_is_closed_and_says_so(sender: SameHost, receiver: RemoteHost) -> None:
    peer = sender.engine.connect(receiver.describe())
    description = receiver.describe()

    def work() -> None:
        with pytest.raises(TransferFailed, match="not connected"):
            sender.engine.submit(peer, [sender.base], [receiver.base], [MIB])
        with pytest.raises(TransferFailed, match="closed"):
            sender.engine.connect(description)
        with pytest.raises(RegistrationError, match="closed"):
            sender.engine.register([])
        assert not before & open_files()

    before = {
        os.readlink(f"/proc/self/fd/{sock.fileno()}")
        for sock in (sender.engine._server._sock, sender.engine.peer(peer)._channel._sock)
    }
    assert in_child(work) == 0
    sender.engine.submit(peer, [sender.base], [receiver.base], [MIB]).wait(10)


def test_a_connection_that_the_engines_thread_has_not_come_to_is_let_go_too(
    sender: SameHost, receiver: RemoteHost
) -> None:
    busy, free = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        free.wait(60)

    sender.engine._loop.call(keep_busy)
    assert busy.wait(60)
    try:
        peer = sender.engine.connect(receiver.describe())
        ours = os.readlink(f"/proc/self/fd/{sender.engine.peer(peer)._channel._sock.fileno()}")

        def work() -> None:
            assert ours not in open_files()

        assert ours in open_files()
        assert in_child(work) == 0
    finally:
        free.set()
    sender.engine.submit(peer, [sender.base], [receiver.base], [MIB]).wait(10)


class Forking(SameHost):
    """One whose process can have a child that outlives it."""

    def fork(self) -> int:
        child = os.fork()
        if child == 0:
            try:
                signal.pause()
            finally:
                os._exit(0)
        return child


def test_a_parents_death_is_noticed_though_a_child_of_it_lives(
    processes: list[object], make_receiver: Callable[..., RemoteHost], directory: Path
) -> None:
    first = make_receiver(name="first")
    dying = RemoteHost(
        first.process, MakeEngine(directory, name="dying"), ArenaMemory, 16 * MIB, 8 * MIB, host=Forking
    )
    here = SameHost(MakeEngine(directory, name="here"), ArenaMemory, 16 * MIB, 8 * MIB)
    try:
        here.register((0, 8 * MIB))
        dying.register((0, 8 * MIB))
        dying.process.call("connect", here.describe())
        lease = a_lease([1])
        here.expect(lease)
        dying.process.call("admit", "here", lease)
        child = dying.process.call("fork")
        try:
            # Without waiting: what `kill` waits on, the child holds open, too.
            os.kill(dying.process.pid, signal.SIGKILL)
            with pytest.raises(TransferFailed, match=r"died|closed"):
                here.incoming[lease.serial].wait(30)
        finally:
            os.kill(child, signal.SIGKILL)
            dying.process.kill()  # it may take a while to die, and nobody is to call it meanwhile
    finally:
        here.close()
