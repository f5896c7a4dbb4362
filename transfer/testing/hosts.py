"""The two sides of a transfer in a test: one here, one in a process of its own."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Callable
from typing import Any, Protocol

from kvarena.transfer.protocol import Region, TransferEngine
from kvarena.transfer.registration.ledger import RegistrationLedger
from kvarena.transfer.testing.memory import leftovers

__all__ = [
    "EngineFactory",
    "EngineHost",
    "Memory",
    "MemoryFactory",
    "PeerProcess",
    "RemoteHost",
    "Sides",
    "Standalone",
]


class Memory(Protocol):
    """What the contract needs of memory: `HostMemory`, or a device's.

    One with several physical handles may say where they meet: ``seams``, absolute addresses.
    """

    base: int
    backed_bytes: int

    @property
    def backed(self) -> Region: ...
    def grow(self, backed_bytes: int) -> None: ...
    def write(self, offset: int, data: bytes) -> None: ...
    def read(self, offset: int, nbytes: int) -> bytes: ...
    def close(self) -> None: ...


class EngineFactory(Protocol):
    """Makes an engine for some memory; another process must be able to import it by its name."""

    def __call__(self, memory: Memory, /) -> TransferEngine: ...


class MemoryFactory(Protocol):
    """Makes memory of so many reserved and backed bytes; importable likewise."""

    def __call__(self, reserved_bytes: int, backed_bytes: int, /) -> Memory: ...


class Standalone:
    """A factory for engines that need no memory to start: ``Standalone(MyEngine, port=0)``.

    Parameters
    ----------
    make : callable
        A class or function that another process can import by its name.
    *args, **kwargs
        Its arguments.
    """

    def __init__(self, make: Callable[..., TransferEngine], *args: Any, **kwargs: Any) -> None:
        self._make = make
        self._args = args
        self._kwargs = kwargs

    def __call__(self, memory: Memory) -> TransferEngine:
        """Make one."""
        return self._make(*self._args, **self._kwargs)


class EngineHost:
    """An engine, memory, and the ledger between them. Offsets are from the memory's base."""

    def __init__(
        self, engine: EngineFactory, memory: MemoryFactory, reserved_bytes: int, backed_bytes: int
    ) -> None:
        self._make_memory: Callable[[], Memory] = lambda: memory(reserved_bytes, backed_bytes)
        self.memory = self._make_memory()
        self.base = self.memory.base
        self.engine = engine(self.memory)
        self.ledger = RegistrationLedger(self.engine)
        self._spans: set[tuple[int, int]] = set()

    def describe(self) -> bytes:
        """The engine's description as of now."""
        return self.engine.describe()

    def register(self, *spans: tuple[int, int]) -> None:
        """Register (offset, nbytes) spans in one call, past the ledger."""
        self.engine.register([Region(self.base + offset, nbytes) for offset, nbytes in spans])
        self._spans.update(spans)

    def unregister(self, *spans: tuple[int, int]) -> None:
        """Unregister (offset, nbytes) spans in one call, past the ledger."""
        self.engine.unregister([Region(self.base + offset, nbytes) for offset, nbytes in spans])
        self._spans.difference_update(spans)

    def move_ledger(self, *, live: bool = False, past_backed: str = "clip", nbytes: int | None = None) -> int:
        """Move the ledger to all of the backed memory, or to `nbytes`; returns its epoch."""
        wanted = Region(self.base, self.memory.backed_bytes if nbytes is None else nbytes)
        self.ledger.move_to(
            [wanted],
            backed=self.memory.backed,
            handle_seams=getattr(self.memory, "seams", ()),
            live=live,
            past_backed="refuse" if past_backed == "refuse" else "clip",
        )
        return self.ledger.epoch

    def registered(self) -> list[tuple[int, int]]:
        """The ledger's regions as (offset, nbytes)."""
        return [(region.address - self.base, region.nbytes) for region in self.ledger.regions]

    def seams(self) -> tuple[int, ...]:
        """The ledger's."""
        return self.ledger.seams

    def grow(self, backed_bytes: int) -> None:
        """Back more memory."""
        self.memory.grow(backed_bytes)

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes into the memory."""
        self.memory.write(offset, data)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Take bytes from the memory."""
        return self.memory.read(offset, nbytes)

    def write_to(self, description: bytes, address: int, offset: int, nbytes: int, timeout: float) -> None:
        """Connect to another engine, and write bytes from `offset` on to one of its addresses."""
        peer = self.engine.connect(description)
        self.engine.submit(peer, [self.base + offset], [address], [nbytes]).wait(timeout)

    def leftovers(self) -> tuple[int, int, int]:
        """Of the process that it is in."""
        return leftovers()

    def renew(self) -> int:
        """Take every registration back and begin with new memory, on the same engine; returns its base."""
        self.ledger.clear()
        self.unregister(*self._spans)
        self.memory.close()
        self.memory = self._make_memory()
        self.base = self.memory.base
        return self.base

    def close(self) -> None:
        """Close the engine, then the memory."""
        self.engine.close()
        self.memory.close()


class PeerProcess:
    """A spawned process that hosts one engine after another, so that tests pay for its start once."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        """For signals."""
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *args: Any, timeout: float = 120.0, **kwargs: Any) -> Any:
        """Call a method of the host over there; its exception is raised here.

        Raises
        ------
        TimeoutError
            No answer; the process has been killed, as its answer would be taken for that of the next call.
        """
        self._connection.send((method, args, kwargs))
        if not self._connection.poll(timeout):
            self.kill()
            raise TimeoutError(f"the peer process did not answer {method} within {timeout:g} s")
        worked, answer = self._connection.recv()
        if not worked:
            raise answer
        return answer

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.join(5)
        self.kill()
        self._process.close()


class RemoteHost:
    """An `EngineHost` in a `PeerProcess`, with the same methods.

    Parameters
    ----------
    process : PeerProcess
        Where; a host that it had before is closed.
    *args
        Of `EngineHost`.
    host : callable, optional
        Makes another kind of host there, importable by its name; further methods are called
        through ``process.call``.
    """

    def __init__(
        self, process: PeerProcess, *args: Any, host: Callable[..., EngineHost] = EngineHost
    ) -> None:
        self.process = process
        self.base: int = process.call("new", host, *args)

    def describe(self) -> bytes:
        """See `EngineHost`; so with the rest."""
        description: bytes = self.process.call("describe")
        return description

    def register(self, *spans: tuple[int, int]) -> None:
        self.process.call("register", *spans)

    def unregister(self, *spans: tuple[int, int]) -> None:
        self.process.call("unregister", *spans)

    def move_ledger(self, **options: Any) -> int:
        epoch: int = self.process.call("move_ledger", **options)
        return epoch

    def registered(self) -> list[tuple[int, int]]:
        regions: list[tuple[int, int]] = self.process.call("registered")
        return regions

    def seams(self) -> tuple[int, ...]:
        seams: tuple[int, ...] = self.process.call("seams")
        return seams

    def grow(self, backed_bytes: int) -> None:
        self.process.call("grow", backed_bytes)

    def write(self, offset: int, data: bytes) -> None:
        self.process.call("write", offset, data)

    def read(self, offset: int, nbytes: int) -> bytes:
        data: bytes = self.process.call("read", offset, nbytes)
        return data

    def write_to(self, description: bytes, address: int, offset: int, nbytes: int, timeout: float) -> None:
        self.process.call("write_to", description, address, offset, nbytes, timeout)

    def leftovers(self) -> tuple[int, int, int]:
        counts: tuple[int, int, int] = self.process.call("leftovers")
        return counts

    def renew(self) -> int:
        self.base = self.process.call("renew")
        return self.base

    def close(self) -> None:
        if self.process.alive:
            self.process.call("close")


class Sides:
    """What a class of tests keeps from one test to the next: processes, and hosts that are reused."""

    def __init__(self) -> None:
        self.processes: list[PeerProcess] = []
        self.source: EngineHost | None = None
        self.target: EngineHost | RemoteHost | None = None

    def process(self) -> PeerProcess:
        """One that lives."""
        if not self.processes or not self.processes[-1].alive:
            self.processes.append(PeerProcess())
        return self.processes[-1]

    def close(self) -> None:
        """End everything."""
        for host in (self.source, self.target):
            if isinstance(host, EngineHost):  # the others end with their process
                host.close()
        for process in self.processes:
            process.close()


def _serve(connection: multiprocessing.connection.Connection) -> None:
    host: Any = None
    while True:
        try:
            method, args, kwargs = connection.recv()
        except EOFError:
            break
        try:
            if method == "new":
                if host is not None:
                    host.close()
                make, *rest = args
                host = make(*rest)
                answer: Any = host.base
            else:
                answer = getattr(host, method)(*args, **kwargs)
            connection.send((True, answer))
        except BaseException as error:  # noqa: BLE001 - raised in the test's process
            connection.send((False, error))
    # Not host.close(): whoever wants to see a clean end closes the host first.
    os._exit(0)
