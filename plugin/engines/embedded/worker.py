"""One process of the embedded engine: ``python -m kvarena.plugin.engines.embedded.worker < config``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import zmq
from kvarena.errors import KvArenaError
from kvarena.errors.shortage import describe_shortage
from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.access import Access
from kvarena.plugin.engines.embedded.config import EngineConfig, SettingError
from kvarena.plugin.engines.embedded.link import Spoke
from kvarena.plugin.engines.embedded.peers import PeerLost

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.engine import Engine
    from kvarena.plugin.engines.embedded.model import Decoder
    from kvarena.plugin.engines.embedded.prefill import PrefillServer

__all__ = ["EXIT_FAILED", "EXIT_REFUSED", "ROLES", "Role", "WorkerConfig", "main"]

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "reference"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode", "reference")

EXIT_FAILED: Final = 1
EXIT_REFUSED: Final = 2
_IDLE_MS: Final = 20


class WorkerConfig(msgspec.Struct, frozen=True):
    """All that a worker is told at its start; JSON on its standard input, for it has a secret."""

    role: Role
    engine: EngineConfig
    settings: Settings
    client: str
    """Address of the client's hub."""
    access: Access = Access()
    """How the processes know each other where they speak over TCP."""
    verbose: bool = False
    """Whether kvarena's INFO lines go to standard error, too."""


def main() -> int:
    """Run a worker until its client says stop, a peer is lost, or its parent is gone."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    logging.basicConfig(format=f"{config.role}: %(levelname)s %(message)s")
    if config.verbose:
        logging.getLogger("kvarena").setLevel(logging.INFO)
    # Ctrl-C reaches the parent too, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _told_to_end)
    with Spoke(config.client, identity=config.role.encode(), access=config.access) as client:
        client.send(control.Online(os.getpid()))
        return _Worker(config, client).run()


class _Terminated(BaseException):
    """SIGTERM: what was made must be taken down, wherever the process is."""


def _told_to_end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


class _Worker:
    def __init__(self, config: WorkerConfig, client: Spoke) -> None:
        self._config = config
        self._client = client
        self._parent = os.getppid()
        self._engine: Engine | None = None

    def run(self) -> int:
        """Serve until told to stop; whatever happens, the engine is closed and the client hears why."""
        error, status = "", 0
        try:
            if self._config.role == "prefill":
                self._serve_prefill()
            elif self._config.role == "decode":
                self._serve_decode()
            else:
                self._serve_reference()
        except _Terminated:
            error, status = "it was told to end.", EXIT_FAILED
        except Exception as failure:  # noqa: BLE001 - its engine must not outlive it, its client must hear
            error, status = _explain(failure), EXIT_FAILED
            if isinstance(failure, (ConfigError, SettingError)):
                status = EXIT_REFUSED
        report, history = {}, None
        if self._engine is not None and self._engine.lifecycle.pool is not None:
            engine = self._engine
            try:
                report = engine.report()
                history = engine.lifecycle.reporter.history()
            except Exception as failure:  # noqa: BLE001 - a report is worth less than an orderly end
                error, status = error or _explain(failure), status or EXIT_FAILED
            try:
                engine.close()
            except Exception as failure:  # noqa: BLE001 - the client must hear
                error, status = error or _explain(failure), status or EXIT_FAILED
        if error:
            logger.warning("%s", error)
        refused = status == EXIT_REFUSED
        self._client.send(control.Stopped(error=error, refused=refused, pool=report, history=history))
        return status

    def _make_engine(self, *, eager_bytes: int | None = None, model: Decoder | None = None) -> Engine:
        # Imports torch: seconds, which the client can see by now.
        from kvarena.plugin.engines.embedded.engine import Engine

        engine = Engine(
            self._config.engine,
            self._config.settings,
            eager_bytes=eager_bytes,
            model=model,
            progress=lambda what: self._client.send(control.Progress(what)),
            name=self._config.role,
        )
        self._engine = engine
        return engine

    def _serve_prefill(self) -> None:
        from kvarena.plugin.engines.embedded.prefill import PrefillServer

        engine = self._make_engine()
        with closing(PrefillServer(engine, self._client.send, access=self._config.access)) as server:
            self._client.send(control.Ready(None, engine.report()))
            try:
                self._run_prefill(server)
            except PeerLost:
                server.drain()
                raise
            server.stop()
            server.drain()

    def _run_prefill(self, server: PrefillServer) -> None:
        while True:
            for message in self._messages():
                if isinstance(message, control.Connect):
                    server.connect(message.address)
                elif isinstance(message, (control.Grow, control.Shrink)):
                    server.elastic.ask(message)
                elif isinstance(message, control.Stop):
                    return
            server.step()
            if not server.busy:
                self._wait(server.link.raw if server.link else None)

    def _serve_decode(self) -> None:
        from kvarena.plugin.engines.embedded.decode import DecodeServer

        engine = self._make_engine()
        with closing(DecodeServer(engine, self._client.send, access=self._config.access)) as server:
            self._client.send(control.Ready(server.hub.address, engine.report()))
            while True:
                for message in self._messages():
                    if isinstance(message, control.Generate):
                        server.submit(message.request)
                    elif isinstance(message, control.Cancel):
                        server.cancel(message.rid)
                    elif isinstance(message, (control.Grow, control.Shrink)):
                        server.elastic.ask(message)
                    elif isinstance(message, control.Stop):
                        server.stop()
                        return
                server.step()
                engine.note_batch(server.batch)
                if not server.busy:
                    self._wait(server.hub.raw)

    def _serve_reference(self) -> None:
        from kvarena.plugin.engines.embedded.engine import make_model
        from kvarena.plugin.engines.embedded.reference import SingleServer

        model = make_model(self._config.engine)
        self._client.send(control.Ready(None, {}))
        server: SingleServer | None = None
        while True:
            for message in self._messages():
                if isinstance(message, control.CompareEager):
                    if self._engine is not None:
                        self._engine.close()
                    engine = self._make_engine(eager_bytes=message.total_bytes, model=model)
                    server = SingleServer(engine, lambda result: self._client.send(control.Finished(result)))
                    self._client.send(control.Eager(message.total_bytes, engine.report()["capacities"]))
                elif isinstance(message, control.Generate) and server is not None:
                    server.submit(message.request)
                elif isinstance(message, control.Stop):
                    return
            if server is not None:
                server.step()
            if server is None or not server.busy:
                self._wait(None)

    def _messages(self) -> list[control.Message]:
        if os.getppid() != self._parent:
            raise KvArenaError("the process that started this worker is gone.")
        return self._client.receive()

    def _wait(self, other: zmq.Socket[bytes] | None) -> None:
        """Sleep until a message comes, but not for long: peers expect signs of life."""
        poller = zmq.Poller()
        for socket in (self._client.raw, other):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        poller.poll(_IDLE_MS)


def _explain(failure: Exception) -> str:
    """What ended a worker, for whoever has to do something about it."""
    if isinstance(failure, KvArenaError):
        return str(failure)
    if shortage := describe_shortage(failure):
        return shortage
    logger.error("an unexpected error", exc_info=failure)
    return f"{type(failure).__name__}: {failure}. This is a fault of kvarena itself: please report it."


if __name__ == "__main__":
    ending = main()
    logging.shutdown()
    # A transfer engine may have a thread that waits for a peer which is gone. It cannot be interrupted, and
    # an orderly exit would unwind it through C++ and end in abort().
    os._exit(ending)
