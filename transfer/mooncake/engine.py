"""Mooncake's transfer engine behind kvarena's protocol."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from kvarena.transfer._batch import check_columns
from kvarena.transfer._worker import PeerWorker, WorkerJob
from kvarena.transfer.errors import RegistrationError, TransferFailed
from kvarena.transfer.mooncake.start import MEANINGS, NOT_REGISTERED, capabilities_of, start
from kvarena.transfer.protocol import Addresses, Pending, Region

__all__ = ["MooncakeEngine"]

log = logging.getLogger(__name__)

# A failure this late was a timeout in the engine: to repeat it would only double the wait.
_RETRY_WITHIN_SECONDS = 2.0
_ADDRESSES = 1 << 64


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    engine: str = "mooncake"
    session: str
    protocol: str


class _Peer:
    __slots__ = ("failed_before", "worker")

    def __init__(self, session: str) -> None:
        self.worker = PeerWorker(f"mooncake {session}")
        self.failed_before = False


class MooncakeEngine:
    """A Mooncake transfer engine of this process, with its own port.

    Regions are registered and unregistered one by one: Mooncake's batch call with one address that
    it does not hold leaves the others blocked for the life of the engine.

    Parameters
    ----------
    hostname : str
        The address at which peers reach this process.
    protocol : {"tcp", "rdma", "nvlink", "efa"}
        ``"tcp"`` sets ``MC_FORCE_TCP=1`` and ``MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=65535`` in the
        environment, unless they are set: without the first Mooncake takes RDMA wherever it finds a card.
    device_name : str
        Network devices, as Mooncake wants them; empty: it chooses.
    location : str
        Where registered memory lives (``"cuda:0"``, ``"cpu:0"``); ``"*"``: Mooncake finds out.
    timeout : float, optional
        Seconds after which Mooncake gives a transfer up (``MC_TRANSFER_TIMEOUT``, at least 5; it is
        30 if neither this nor the variable is set). Set for the process, unless it is set.
    transfer_engine : optional
        An initialised ``mooncake.engine.TransferEngine`` to use instead of a new one; the caller
        keeps it. Needs no ``hostname`` but the one that it was initialised with.

    Raises
    ------
    EngineUnavailable
        Mooncake is missing, broken, installed twice, or does not start.
    """

    def __init__(
        self,
        hostname: str = "127.0.0.1",
        *,
        protocol: str = "tcp",
        device_name: str = "",
        location: str = "*",
        timeout: float | None = None,
        transfer_engine: Any = None,
        name: str = "mooncake",
    ) -> None:
        self.name = name
        self.protocol = protocol
        self.retries = 0
        self._location = location
        self._lock = threading.RLock()
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, _Peer] = {}
        self._closed = False
        if transfer_engine is None:
            transfer_engine = start(hostname, protocol, device_name, timeout)
        self._engine = transfer_engine
        self.session = f"{hostname}:{transfer_engine.get_rpc_port()}"
        self.capabilities = capabilities_of(protocol, os.environ)

    def register(self, regions: Sequence[Region]) -> None:
        """All or nothing; every return code is checked."""
        with self._lock:
            done: list[Region] = []
            try:
                for region in regions:
                    self._register(region)
                    done.append(region)
            except RegistrationError:
                self._put_back(self._unregister, done)
                raise

    def unregister(self, regions: Sequence[Region]) -> None:
        """All or nothing; Mooncake never sees an address that this engine did not register."""
        with self._lock:
            for index, region in enumerate(regions):
                if self._regions.get(region.address) != region or region in regions[:index]:
                    raise self._refused("unregister", region, None, "this engine did not register it")
            done: list[Region] = []
            try:
                for region in regions:
                    self._unregister(region)
                    done.append(region)
            except RegistrationError:
                self._put_back(self._register, done)
                raise

    def describe(self) -> bytes:
        """The session, ``host:port``; regions are not in it, for the target checks every write itself."""
        return msgspec.json.encode(_Description(session=self.session, protocol=self.protocol))

    def connect(self, description: bytes) -> str:
        """The peer's session. Raises `TransferFailed` if it is no Mooncake session or does not answer."""
        try:
            peer = msgspec.json.decode(description, type=_Description)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TransferFailed(self.name, "?", None, f"not a Mooncake description: {error}") from error
        if peer.engine != "mooncake" or peer.protocol != self.protocol:
            raise TransferFailed(
                self.name,
                peer.session,
                None,
                f"it speaks {peer.engine}/{peer.protocol}, not mooncake/{self.protocol}",
            )
        self._refuse_if_closed(peer.session)
        code = self._engine.send_probe(peer.session)
        if code != 0:
            raise TransferFailed(
                self.name,
                peer.session,
                code,
                MEANINGS.get(code, ""),
                fix="Set the peer's KVARENA_TRANSFER_HOST to an address that it is reached at from here.",
            )
        with self._lock:
            if peer.session not in self._peers:
                self._peers[peer.session] = _Peer(peer.session)
        return peer.session

    def disconnect(self, peer: str) -> None:
        """Forget a peer; what has not begun fails, what has begun ends by Mooncake's own timeout."""
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            known.worker.stop(0.0)

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Pending:
        """Start writing; operations beyond a batch's limit follow in further batches."""
        columns = check_columns(self.name, peer, src, dst, lengths)
        sources, targets, sizes = (column.tolist() for column in columns)
        self._refuse_if_closed(peer)
        with self._lock:
            known = self._peers.get(peer)
        if known is None:
            raise TransferFailed(self.name, peer, None, "not connected", operations=len(sources))
        step = self.capabilities.max_batch or max(1, len(sources))

        def work() -> None:
            for first in range(0, len(sources), step):
                part = slice(first, first + step)
                self._write(known, peer, sources[part], targets[part], sizes[part])

        job = WorkerJob(self.name, peer, len(sources), work)
        known.worker.put(job)
        return job

    def close(self) -> None:
        """Stop, unregister everything, let the engine go; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers, self._peers = self._peers, {}
        idle = [peer.worker.stop(_RETRY_WITHIN_SECONDS) for peer in peers.values()]
        with self._lock:
            for region in tuple(self._regions.values()):
                try:
                    self._unregister(region)
                except RegistrationError as error:
                    log.warning("%s", error)
            self._regions.clear()
            if all(idle):
                self._engine = None
            else:  # a thread is still inside it, and to destroy it there would crash
                log.warning("%s: a transfer to a peer that hangs keeps the engine alive", self.name)
                _abandoned.append(self._engine)

    def _register(self, region: Region) -> None:
        if self._closed:
            raise self._refused("register", region, None, "the engine is closed")
        if region.address < 0 or region.nbytes < 0 or region.end > _ADDRESSES:
            # Mooncake does not look at the end, and its bindings raise something else for the rest.
            raise self._refused("register", region, None, "no memory is there")
        code = self._engine.register_memory(region.address, region.nbytes, self._location)
        if code != 0:
            raise self._refused("register", region, code, MEANINGS.get(code, ""))
        self._regions[region.address] = region

    def _unregister(self, region: Region) -> None:
        code = self._engine.unregister_memory(region.address)
        if code != 0:
            raise self._refused("unregister", region, code, MEANINGS.get(code, ""))
        del self._regions[region.address]

    def _put_back(self, step: Callable[[Region], None], done: Sequence[Region]) -> None:
        for region in reversed(done):
            try:
                step(region)
            except RegistrationError as error:  # the first refusal is the one to raise
                log.error("%s: could not be undone: %s", self.name, error)

    def _refused(self, action: str, region: Region, code: int | None, meaning: str) -> RegistrationError:
        return RegistrationError(
            self.name,
            region,
            code,
            action=action,
            meaning=meaning,
            unknown=action == "unregister" and code in (None, NOT_REGISTERED),
        )

    def _refuse_if_closed(self, peer: str) -> None:
        if self._closed:
            raise TransferFailed(self.name, peer, None, "the engine is closed")

    def _write(self, peer: _Peer, session: str, src: list[int], dst: list[int], lengths: list[int]) -> None:
        """Write one batch, on the peer's thread.

        A refused transfer breaks a lane of its connection, and the next good one may fail for it:
        after a failure, and only then, one that fails quickly is tried once more.
        """
        started = time.monotonic()
        code = self._engine.batch_transfer_sync_write(session, src, dst, lengths)
        if code != 0 and peer.failed_before and time.monotonic() - started < _RETRY_WITHIN_SECONDS:
            self.retries += 1
            code = self._engine.batch_transfer_sync_write(session, src, dst, lengths)
        peer.failed_before = code != 0
        if code != 0:
            raise TransferFailed(
                self.name, session, code, "refused by the peer, or the peer is gone", operations=len(src)
            )


# Engines that a thread was inside of when they were closed.
_abandoned: list[Any] = []
