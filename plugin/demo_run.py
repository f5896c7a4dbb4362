"""The demo's parent process: starts the workers, is their client, and judges what they answer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Final

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.demo_input import InputError
from kvarena.plugin.demo_verdict import DemoReport, judge
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.config import EngineConfig
from kvarena.plugin.engines.embedded.link import Hub
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.plugin.engines.embedded.worker import ROLES, Role, WorkerConfig
from kvarena.plugin.status.model import ArenaHistory

__all__ = ["Demo", "StartupError"]

_PAIR: Final[tuple[Role, ...]] = ("prefill", "decode")
_STARTUP_S: Final = 120.0
_GRACE_S: Final = 20.0


class StartupError(KvArenaError):
    """A worker refused its settings, or could not start."""


class Demo:
    """One run: a prefill and a decode worker serve requests, a third process checks their tokens.

    Parameters
    ----------
    config : EngineConfig
        Of every worker.
    settings : Settings
        The operator's; names one transfer engine.
    requests : list of Request
    port : int
        Of the control socket on the loopback address; 0: a free one.
    on_event : callable, optional
        Takes the role and each message of a worker, as it comes.

    Raises
    ------
    AddressInUse
        Something listens on `port`.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: Settings,
        requests: list[Request],
        *,
        port: int = 0,
        on_event: Callable[[Role, control.Message], None] = lambda role, message: None,
    ) -> None:
        if len(settings.transfer) != 1:
            raise ConfigError(
                f"the demo moves pages with one transfer engine, {len(settings.transfer)} are set.",
                fix="Give one name with --transfer.",
            )
        self._config = config
        self._settings = settings
        self._requests = requests
        self._on_event = on_event
        self._hub = Hub(port=port)
        self.processes: dict[Role, subprocess.Popen[bytes]] = {}
        """The workers, as long as `run` lasts."""
        self.histories: dict[Role, ArenaHistory] = {}
        """The arena of each worker over time, once it has ended."""
        self._logs: dict[Role, IO[bytes]] = {}
        self._ready: dict[Role, control.Ready] = {}
        self._stopped: dict[Role, control.Stopped] = {}
        self._connected = False
        self._refused = ""
        self._results: dict[Role, dict[int, Result]] = {"decode": {}, "reference": {}}
        self._eager: dict[int, dict[str, int]] = {}

    def run(self) -> DemoReport:
        """Run to the verdict.

        Returns
        -------
        DemoReport
            Also when a worker died in the middle; it then says so.

        Raises
        ------
        StartupError
            Nothing was served, because of the settings.
        InputError
            The prompts are more than the pool holds.
        """
        began = time.monotonic()
        try:
            for role in _PAIR:
                self._spawn(role)
            failure = self._serve()
            return judge(
                requests=self._requests,
                served=self._results["decode"],
                reference=self._results["reference"],
                started={role: ready.pool for role, ready in self._ready.items()},
                ended={role: stopped.pool for role, stopped in self._stopped.items()},
                eager=self._eager,
                failures=failure,
                seconds=time.monotonic() - began,
            )
        finally:
            self._end_all()

    def _serve(self) -> list[str]:
        """Everything between start and verdict; returns what went wrong with the workers."""
        self._until_ready(_PAIR)
        self._check_capacity()
        # Its imports take a while, during which the pair works.
        self._spawn("reference")
        address = self._ready["decode"].address
        assert address is not None
        self._send("prefill", control.Connect(address))
        self._until(lambda: self._connected or bool(self._refused), limit=_STARTUP_S)
        if self._refused:
            return [self._refused]
        for request in self._requests:
            self._send("decode", control.Generate(request))
        self._until(lambda: self._served("decode"))
        if self._failed():
            # The survivor notices by itself, says what it has released, and ends.
            limit = self._settings.transfer_timeout + _GRACE_S
            self._until(lambda: all(self._over(role) for role in _PAIR), limit=limit, heed_failures=False)
            return self._failed()
        self._stop(_PAIR)
        if self._failed():
            return self._failed()
        self._until_ready(("reference",))
        for role in _PAIR:
            self._compare_eager(self._ready[role].pool["capacities"]["total_bytes"])
        for request in self._requests:
            self._send("reference", control.Generate(request))
        self._until(lambda: self._served("reference"))
        self._stop(("reference",))
        return self._failed()

    def _until_ready(self, roles: tuple[Role, ...]) -> None:
        self._until(lambda: all(role in self._ready for role in roles), limit=_STARTUP_S)
        failed = self._failed()
        if failed:
            raise StartupError("\n".join(failed))
        late = [role for role in roles if role not in self._ready]
        if late:
            raise StartupError(f"{' and '.join(late)}: not ready within {_STARTUP_S:g} s.")

    def _check_capacity(self) -> None:
        tokens = sum(len(request.tokens) for request in self._requests)
        capacity = min(self._ready[role].pool["capacity_tokens"] for role in _PAIR)
        if tokens > capacity:
            raise InputError(
                f"the input has {tokens} tokens, which is larger than the pool: it holds {capacity}.",
                fix="Give a shorter file, or raise --memory-limit.",
            )

    def _compare_eager(self, total_bytes: int) -> None:
        """Let the reference make an eager pool of that size; the last one serves its requests."""
        if total_bytes not in self._eager:
            self._send("reference", control.CompareEager(total_bytes))
            self._until(lambda: total_bytes in self._eager, limit=_STARTUP_S)

    def _spawn(self, role: Role) -> None:
        settings = self._settings
        if role == "reference":
            settings = msgspec.structs.replace(settings, transfer=())
        if settings.metrics_port:
            # Each process serves its own: prefill at the port that is set, the others behind it.
            port = settings.metrics_port + ROLES.index(role)
            settings = msgspec.structs.replace(settings, metrics_port=port)
        config = WorkerConfig(role, self._config, settings, self._hub.address)
        # What libraries print is shown only if the worker dies of something.
        log = self._logs[role] = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "kvarena.plugin.engines.embedded.worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # One thread each: the workers share the cores, and a fixed number keeps the rounding the same.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.processes[role] = process
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(config))

    def _send(self, role: Role, message: control.Message) -> None:
        self._hub.send(role.encode(), message)

    def _stop(self, roles: tuple[Role, ...]) -> None:
        for role in roles:
            self._send(role, control.Stop())
        self._until(lambda: all(self._over(role) for role in roles), limit=_GRACE_S)
        for role in roles:
            if not self._over(role) and not self._failed():
                what = f"it did not stop within {_GRACE_S:g} s."
                self._take(role.encode(), control.Stopped(what, refused=False, pool={}))

    def _until(
        self, condition: Callable[[], bool], *, limit: float | None = None, heed_failures: bool = True
    ) -> None:
        """Take messages until a condition holds, a worker fails, or time is up."""
        end = None if limit is None else time.monotonic() + limit
        while not condition():
            if heed_failures and self._failed():
                return
            if end is not None and time.monotonic() > end:
                return
            # Asked first: what a process said before its end has then arrived.
            ended = {role for role, process in self.processes.items() if process.poll() is not None}
            messages = self._hub.receive(0.05)
            for peer, message in messages:
                self._take(peer, message)
            if not messages:
                for role in ended - self._stopped.keys():
                    self._take(role.encode(), control.Stopped(self._epitaph(role), refused=False, pool={}))

    def _take(self, peer: bytes, message: control.Message) -> None:
        role = next((role for role in ROLES if role.encode() == peer), None)
        if role is None:
            return
        if isinstance(message, control.Ready):
            self._ready[role] = message
        elif isinstance(message, control.Connected):
            self._connected = True
        elif isinstance(message, control.Refused):
            self._refused = message.what
        elif isinstance(message, control.Finished):
            self._results[role][message.result.rid] = message.result
        elif isinstance(message, control.Eager):
            self._eager[message.total_bytes] = message.capacities
        elif isinstance(message, control.Stopped):
            self._stopped[role] = message
            if message.history is not None:
                self.histories[role] = message.history
        self._on_event(role, message)

    def _epitaph(self, role: Role) -> str:
        """What is known of a process that ended without a word."""
        code = self.processes[role].returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        log = self._logs[role]
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"it {how}" + (f"; its last line was: {last[0]}" if last and code >= 0 else ".")

    def _served(self, role: Role) -> bool:
        return len(self._results[role]) == len(self._requests)

    def _over(self, role: Role) -> bool:
        return role in self._stopped

    def _failed(self) -> list[str]:
        return [f"{role}: {stopped.error}" for role, stopped in self._stopped.items() if stopped.error]

    def _end_all(self) -> None:
        for role, process in self.processes.items():
            if process.poll() is None and role not in self._stopped:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs.values():
            log.close()
        self._hub.close()
