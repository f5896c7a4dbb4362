"""Hosts over a real arena, for tests in several processes: spawned ones import this by its name."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from kvarena.pool import Arena, CudaVmm, HostVmm
from kvarena.transfer import (
    ArenaPages,
    Capabilities,
    LeaseError,
    LeaseTable,
    Manifest,
    MooncakeEngine,
    PageChannel,
    QuiesceTimeout,
    Region,
    SubPoolManifest,
)
from kvarena.transfer.testing import EngineHost

PAGE = 8192
MANIFEST = Manifest(
    sub_pools=(SubPoolManifest(name="full", page_bytes=PAGE, page_size=1, layers=(0,), dtype="uint8"),)
)


class ArenaMemory:
    """An arena on the host driver, as the engine contract wants memory."""

    def __init__(self, reserved_bytes: int, backed_bytes: int) -> None:
        self.arena = Arena(HostVmm(), reserved_bytes)
        self.arena.back(4096)  # a sink, swapped for one handle at once, as finalize does
        self.arena.back(backed_bytes)
        self.base = self.arena.base
        self._bytes = self.arena.tensor.numpy()

    @property
    def backed_bytes(self) -> int:
        return self.arena.backed_bytes

    @property
    def backed(self) -> Region:
        return Region(self.base, self.backed_bytes)

    @property
    def seams(self) -> tuple[int, ...]:
        return self.arena.seams

    def grow(self, backed_bytes: int) -> None:
        self.arena.grow(backed_bytes)

    def write(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)] = bytearray(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        data: bytes = self._bytes[offset : offset + nbytes].tobytes()
        return data

    def close(self) -> None:
        self.arena.close()


class CudaArenaMemory:
    """An arena on GPU 0, as the engine contract wants memory."""

    def __init__(self, reserved_bytes: int, backed_bytes: int) -> None:
        import torch

        self._torch = torch
        self.arena = Arena(CudaVmm(0), reserved_bytes)
        self.arena.back(self.arena.driver.granularity)
        self.arena.back(backed_bytes)
        self.base = self.arena.base
        self._bytes = self.arena.tensor

    @property
    def backed_bytes(self) -> int:
        return self.arena.backed_bytes

    @property
    def backed(self) -> Region:
        return Region(self.base, self.backed_bytes)

    @property
    def seams(self) -> tuple[int, ...]:
        return self.arena.seams

    def grow(self, backed_bytes: int) -> None:
        self.arena.grow(backed_bytes)

    def write(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)] = self._torch.frombuffer(
            bytearray(data), dtype=self._torch.uint8
        )
        self._torch.cuda.synchronize()

    def read(self, offset: int, nbytes: int) -> bytes:
        self._torch.cuda.synchronize()
        data: bytes = self._bytes[offset : offset + nbytes].cpu().numpy().tobytes()
        return data

    def close(self) -> None:
        self.arena.close()


class SlowMooncake(MooncakeEngine):
    """Mooncake as if its registrations could not follow a live peer."""

    def __init__(self) -> None:
        super().__init__(timeout=5)
        self.capabilities = Capabilities(
            crosses_seams=False, spans_handles=True, max_batch=self.capabilities.max_batch
        )


def page_bytes_of(request: str, index: int) -> bytes:
    """What a request's page holds: nothing that another request's has."""
    return random.Random(f"{request}/{index}").randbytes(64) * (PAGE // 64)


class Receiver(EngineHost):
    """The decode side: leases pages, verifies what arrives, and grows and gives back meanwhile."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.memory, ArenaMemory)
        self.arena = self.memory.arena
        self.leases = LeaseTable(gate=self.ledger.gate)
        self.channel = PageChannel(self.ledger, MANIFEST, self._pages)
        self._num_pages = 0
        self._finished = 0
        self._churn: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._random = random.Random(7)
        self._register()

    def ask(self, request: str, count: int) -> tuple[bytes, bytes] | None:
        """A lease of pages anywhere in what is backed now, and a hello; None: ask again."""
        held = {page for lease in self.leases.active for page in lease.pages["full"]}
        free = sorted(set(range(1, self._num_pages)) - held)
        start = self._random.randrange(max(1, len(free) - count))
        pages = (
            free[start : start + count] if self._random.random() < 0.5 else self._random.sample(free, count)
        )
        try:
            lease = self.leases.grant(request, {"full": pages}, epoch=self.ledger.epoch, gate_timeout=0.02)
        except (LeaseError, QuiesceTimeout):
            return None
        return lease.encode(), self.channel.hello()

    def finish(self, request: str, serial: int) -> int:
        """The transfer is done: how many pages hold other bytes than they should."""
        lease = self.leases.check(request, serial)
        wrong = sum(
            self.read(page * PAGE, PAGE) != page_bytes_of(request, i)
            for i, page in enumerate(lease.pages["full"])
        )
        self.leases.complete(request, serial)
        self._finished += 1
        return wrong

    def start_churn(self, cycles: int) -> None:
        """Grow twice and give back twice, so many times, while requests come and go."""
        self._churn = threading.Thread(target=self._run_churn, args=(cycles,), daemon=True)
        self._churn.start()

    def churning(self) -> bool:
        """Whether that still goes on; raises what ended it."""
        if self._failure is not None:
            raise self._failure
        return self._churn is not None and self._churn.is_alive()

    def _run_churn(self, cycles: int) -> None:
        try:
            start = self.arena.backed_bytes
            step = start // 2
            for _ in range(cycles):
                for size in (start + step, start + 2 * step):
                    self.arena.grow(size)
                    self._register()
                    self._await_traffic()
                for size in (start + step, start):
                    self._num_pages = size // PAGE
                    self.leases.drain_tail({"full": self._num_pages}, timeout=20)
                    self._register(size)
                    self.arena.shrink(size)
                    self.leases.open_tail()
                    self._await_traffic()
        except BaseException as error:  # noqa: BLE001 - raised by churning()
            self._failure = error

    def _await_traffic(self) -> None:
        """Let two requests end before the next change."""
        wanted, deadline = self._finished + 2, time.monotonic() + 20
        while self._finished < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError("traffic has stopped")
            time.sleep(0.001)

    def _register(self, nbytes: int | None = None) -> None:
        wanted = Region(self.base, self.arena.backed_bytes if nbytes is None else nbytes)
        self.ledger.move_to(
            [wanted],
            backed=Region(self.base, self.arena.backed_bytes),
            handle_seams=self.arena.seams,
            live=True,
            past_backed="refuse",
            quiesce_timeout=20,
        )
        self._num_pages = wanted.nbytes // PAGE

    def _pages(self) -> dict[str, ArenaPages]:
        return {"full": ArenaPages(self.base, self._num_pages)}
