"""What every transfer engine must do, as tests to inherit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
from kvarena.transfer.errors import RegistrationError, TransferFailed, TransferTimeout
from kvarena.transfer.testing.hosts import EngineHost, RemoteHost
from kvarena.transfer.testing.memory import assert_same_bytes
from kvarena.transfer.testing.pairs import Pair, pattern
from kvarena.transfer.testing.registration import RegistrationContract
from kvarena.transfer.testing.transfers import TransferContract

__all__ = ["TransferEngineContract"]


class TransferEngineContract(RegistrationContract, TransferContract):
    """Inherit, and say how to make the engine:

    .. code-block:: python

        from kvarena.transfer.testing import Standalone, TransferEngineContract

        class TestMyEngine(TransferEngineContract):
            engine_factory = Standalone(MyEngine)

    Every test gets a fresh pair of engines, so what one test breaks no other sees, unless `reuses_engines`.
    """

    def test_a_peer_that_died_is_reported_and_its_successor_is_reached(self, ready: Pair) -> None:
        peer = ready.connect()
        ready.submit(peer, (0, 0, 4096)).wait(self.timeout)
        if isinstance(ready.target, RemoteHost):
            ready.target.process.kill()
        else:
            ready.target.close()
        with pytest.raises((TransferFailed, TransferTimeout)):
            ready.submit(peer, (0, 0, self.backed_bytes)).wait(self.timeout)
        ready.source.engine.disconnect(peer)
        ready.target = ready.make_target()
        ready.target.move_ledger()
        ready.submit(ready.connect(), (0, 0, self.backed_bytes)).wait(self.timeout)
        assert_same_bytes(ready.target.read(0, self.backed_bytes), pattern(1, self.backed_bytes))

    def test_an_unknown_peer_is_refused(self, ready: Pair) -> None:
        with pytest.raises(TransferFailed):
            ready.submit("nobody", (0, 0, 16)).wait(self.timeout)
        ready.source.engine.disconnect("nobody")
        peer = ready.connect()
        ready.source.engine.disconnect(peer)
        with pytest.raises(TransferFailed):
            ready.submit(peer, (0, 0, 16)).wait(self.timeout)
        ready.submit(ready.connect(), (0, 0, 16)).wait(self.timeout)

    def test_a_description_of_something_else_is_refused(self, ready: Pair) -> None:
        for description in (b"", b"no description", b"\xff\x00" * 20):
            with pytest.raises(TransferFailed):
                ready.source.engine.connect(description)
        ready.submit(ready.connect(), (0, 0, 16)).wait(self.timeout)

    def test_a_closed_engine_refuses_and_closes_again(self, ready: Pair) -> None:
        with self.another_host() as source:
            source.move_ledger()
            pair = Pair(source, ready.target, ready.make_target)
            peer = pair.connect()
            pair.submit(peer, (0, 0, 16)).wait(self.timeout)
            source.engine.close()
            source.engine.close()
            with pytest.raises(TransferFailed):
                pair.submit(peer, (0, 0, 16)).wait(self.timeout)
            with pytest.raises(RegistrationError):
                source.register((0, 4096))

    @pytest.mark.parametrize("used", [False, True])
    def test_an_engine_closes_though_a_peer_is_connected(self, ready: Pair, used: bool) -> None:
        """One that has only just come, too: the engine may not know of it yet."""
        engine = ready.source.engine
        with contextlib.ExitStack() as stack, self.another_host() as target:
            target.move_ledger()
            peer = engine.connect(target.describe())
            stack.callback(engine.disconnect, peer)
            if used:
                engine.submit(peer, [ready.source.base], [target.base], [4096]).wait(self.timeout)

    def test_peers_that_were_disconnected_leave_nothing(self, ready: Pair) -> None:
        def once() -> None:
            peer = ready.connect()
            ready.submit(peer, (0, 0, 4096)).wait(self.timeout)
            ready.source.engine.disconnect(peer)

        self._leaves_nothing(once, 8, ready.source, ready.target)

    def test_engines_that_were_closed_leave_nothing(self, ready: Pair) -> None:
        def once() -> None:
            with self.another_host() as source:
                source.move_ledger()
                pair = Pair(source, ready.target, ready.make_target)
                pair.submit(pair.connect(), (0, 0, 4096)).wait(self.timeout)

        self._leaves_nothing(once, 3, ready.source, ready.target)

    def _leaves_nothing(self, once: Callable[[], None], times: int, *hosts: EngineHost | RemoteHost) -> None:
        once()  # what a library loads or starts once is no leak
        before = [host.leftovers() for host in hosts]
        for _ in range(times):
            once()
        deadline = time.monotonic() + 5
        while True:  # threads and connections that are ending may take a moment
            grown = [
                tuple(after - past for after, past in zip(host.leftovers(), then, strict=True))
                for host, then in zip(hosts, before, strict=True)
            ]
            if all(
                more <= maximum
                for each in grown
                for more, maximum in zip(each, self.leak_allowance, strict=True)
            ):
                return
            assert time.monotonic() < deadline, f"descriptors, mappings and threads grew by {grown}"
            time.sleep(0.02)
