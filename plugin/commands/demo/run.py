"""The demo's parent process: starts the workers, is their client, and judges what they answer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, NamedTuple

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.commands.demo.growth import GrowthDriver
from kvarena.plugin.commands.demo.hosts import TwoHosts
from kvarena.plugin.commands.demo.text_input import InputError
from kvarena.plugin.commands.demo.verdict import DemoReport, Findings, judge
from kvarena.plugin.commands.demo.workers import GRACE_S, INTERRUPTED_GRACE_S, Workers
from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.access import Access, local_endpoint, new_secret
from kvarena.plugin.engines.embedded.config import EngineConfig
from kvarena.plugin.engines.embedded.link import Hub
from kvarena.plugin.engines.embedded.requests import Request, Result
from kvarena.plugin.engines.embedded.worker import ROLES, Role, WorkerConfig
from kvarena.plugin.observe.status.model import ArenaHistory

__all__ = ["Demo", "DemoOptions", "StartupError"]

_PAIR: Final[tuple[Role, ...]] = ("prefill", "decode")
_STARTUP_S: Final = 120.0
_LOOPBACK: Final = "127.0.0.1"


class StartupError(KvArenaError):
    """A worker refused its settings, or could not start."""


class DemoOptions(NamedTuple):
    """How a demo run differs from the shortest one."""

    decode_device: str | None = None
    """Where the decode worker runs; None: where the others do."""
    port: int = 0
    """Of a control socket on the loopback address; 0: a Unix socket in this user's own directory."""
    insecure: bool = False
    """Take control messages over TCP from any process of this host."""
    growth: tuple[int, int] | None = None
    """How often each pool grows and gives back while requests are served, and by how many bytes; the
    requests are then served again and again until that has been done."""
    hosts: TwoHosts | None = None
    """Where the pair runs, entered by the caller; None: on this host."""
    verbose: bool = False
    """Let the workers log to this process's standard error."""


class Demo:
    """One run: a prefill and a decode worker serve requests, a third process checks their tokens.

    Parameters
    ----------
    config : EngineConfig
        Of every worker.
    settings : Settings
        The operator's; names one transfer engine.
    requests : list of Request
    options : DemoOptions, optional
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
        options: DemoOptions | None = None,
        *,
        on_event: Callable[[Role, control.Message], None] = lambda role, message: None,
    ) -> None:
        if len(settings.transfer) != 1:
            raise ConfigError(
                f"the demo moves pages with one transfer engine, {len(settings.transfer)} are set.",
                fix="Give one name with --transfer.",
            )
        options = options or DemoOptions()
        device, hosts, port = options.decode_device, options.hosts, options.port
        self._config = config
        self._decode_config = config if device is None else config.evolve(device=device)
        self._verbose = options.verbose
        self._settings = settings
        self._requests = requests
        self._on_event = on_event
        self._hosts = hosts
        self._growth = None if options.growth is None else GrowthDriver(*options.growth, self._send)
        self._closing = ExitStack()
        self._access = Access("" if options.insecure else new_secret(), options.insecure)
        # A Unix socket is reached from the networks of both hosts, too.
        endpoint = _LOOPBACK if port else local_endpoint(settings)
        self._hub = Hub(endpoint, port, access=self._access)
        self._closing.callback(self._hub.close)
        self._workers = Workers(verbose=options.verbose)
        self.histories: dict[Role, ArenaHistory] = {}
        """The arena of each worker over time, once it has ended."""
        self._ready: dict[Role, control.Ready] = {}
        self._stopped: dict[Role, control.Stopped] = {}
        self._connected = False
        self._refused = ""
        self._results: dict[Role, dict[int, Result]] = {"decode": {}, "reference": {}}
        self._eager: dict[int, dict[str, int]] = {}
        self._repeats: dict[int, int] = {}
        """Requests that were served again: their id, and that of the first time."""
        # Beside the pair where each has memory of its own; on a GPU the reference's pool comes after theirs.
        self._side_by_side = not config.on_gpu

    @property
    def processes(self) -> dict[Role, subprocess.Popen[bytes]]:
        """The workers."""
        return self._workers.processes

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
        began, grace_s = time.monotonic(), GRACE_S
        try:
            for role in _PAIR:
                self._spawn(role)
            failure = self._serve()
            return judge(
                Findings(
                    requests=self._requests,
                    served=self._results["decode"],
                    repeats=self._repeats,
                    reference=self._results["reference"],
                    started={role: ready.pool for role, ready in self._ready.items()},
                    ended={role: stopped.pool for role, stopped in self._stopped.items()},
                    eager=self._eager,
                    failures=failure,
                    growth=self._growth,
                    hosts=self._hosts,
                ),
                seconds=time.monotonic() - began,
            )
        except BaseException:
            grace_s = INTERRUPTED_GRACE_S
            raise
        finally:
            self._workers.end_all(set(self._stopped), grace_s)
            self._closing.close()

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
        self._until(self._pair_is_done)
        if self._failed():
            if not any(self._over(role) for role in _PAIR):
                return self._failed()
            # The survivor notices by itself, says what it has released, and ends.
            limit = self._settings.transfer_timeout + GRACE_S
            self._until(lambda: all(self._over(role) for role in _PAIR), limit=limit, heed_failures=False)
            return self._failed()
        self._stop(_PAIR)
        if self._failed():
            return self._failed()
        self._until_ready(("reference",))
        if not self._side_by_side:
            self._ask_reference()
        self._until(lambda: len(self._results["reference"]) == len(self._requests))
        self._stop(("reference",))
        return self._failed()

    def _pair_is_done(self) -> bool:
        """Whether every request has been answered, and every change of size made."""
        answers = self._results["decode"]
        outstanding = len(self._requests) + len(self._repeats) - len(answers)
        if self._growth is None or self._growth.finished:
            return outstanding == 0
        if any(result.reason == "error" for result in answers.values()):
            if outstanding == 0:
                self._growth.give_up()
            return outstanding == 0
        while outstanding < len(self._requests):
            self._serve_again()
            outstanding += 1
        return False

    def _serve_again(self) -> None:
        """Send one of the requests once more, under an id of its own."""
        again = len(self._repeats)
        first = self._requests[again % len(self._requests)]
        rid = max(request.rid for request in self._requests) + 1 + again
        self._repeats[rid] = first.rid
        self._send("decode", control.Generate(Request(rid, first.tokens, first.max_new_tokens)))

    def _ask_reference(self) -> None:
        """Let the reference make eager pools of the pair's sizes; the last one serves the requests."""
        for total in {self._ready[role].pool["capacities"]["total_bytes"]: None for role in _PAIR}:
            self._send("reference", control.CompareEager(total))
        for request in self._requests:
            self._send("reference", control.Generate(request))

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
                fix=f"Give a shorter file, or {self._more_room()}.",
            )

    def _more_room(self) -> str:
        """Which setting has made the pool as small as it is."""
        settings = self._settings
        limit, maximum = settings.memory_limit, settings.pool_bytes
        if maximum is not None and (limit is None or maximum <= limit - settings.headroom):
            return "raise KVARENA_POOL_BYTES" + (" (--memory-limit)" if self._config.on_gpu else "")
        return "raise --memory-limit" + (", or lower KVARENA_HEADROOM" if settings.headroom else "")

    def _spawn(self, role: Role) -> None:
        settings = self._settings
        if role == "reference":
            settings = msgspec.structs.replace(settings, transfer=())
        elif self._hosts is not None:
            settings = msgspec.structs.replace(settings, transfer_host=self._hosts.address(role))
        if settings.metrics_port:
            # Each process serves its own: prefill at the port that is set, the others behind it.
            port = settings.metrics_port + ROLES.index(role)
            settings = msgspec.structs.replace(settings, metrics_port=port)
        prefix = () if self._hosts is None else self._hosts.prefix(role)
        config = self._decode_config if role == "decode" else self._config
        worker = WorkerConfig(role, config, settings, self._hub.address, self._access, self._verbose)
        self._workers.start(worker, prefix=prefix)

    def _send(self, role: Role, message: control.Message) -> None:
        self._hub.send(role.encode(), message)

    def _stop(self, roles: tuple[Role, ...]) -> None:
        for role in roles:
            self._send(role, control.Stop())
        # The others' last words are wanted, too, when one has failed.
        self._until(lambda: all(self._over(role) for role in roles), limit=GRACE_S, heed_failures=False)
        for role in roles:
            if not self._over(role) and not self._failed():
                what = f"it did not stop within {GRACE_S:g} s."
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
            if self._hosts is not None:
                self._hosts.tick()
            # Asked first: what a process said before its end has then arrived.
            ended = self._workers.ended()
            messages = self._hub.receive(0.05)
            for peer, message in messages:
                self._take(peer, message)
            if not messages:
                for role in ended - self._stopped.keys():
                    what = self._workers.describe_end(role)
                    self._take(role.encode(), control.Stopped(what, refused=False, pool={}))

    def _take(self, peer: bytes, message: control.Message) -> None:
        role = next((role for role in ROLES if role.encode() == peer), None)
        if role is None:
            return
        if isinstance(message, control.Ready):
            self._ready[role] = message
            if role == "reference" and self._side_by_side:
                self._ask_reference()
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
        if self._growth is not None:
            self._growth.take(role, message)
        if self._hosts is not None:
            self._hosts.take(message)
        self._on_event(role, message)

    def _over(self, role: Role) -> bool:
        return role in self._stopped

    def _failed(self) -> list[str]:
        return [f"{role}: {stopped.error}" for role, stopped in self._stopped.items() if stopped.error]
