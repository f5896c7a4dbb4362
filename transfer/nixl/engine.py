"""NIXL behind kvarena's protocol."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from kvarena.transfer._batch import check_columns
from kvarena.transfer._worker import WorkerJob
from kvarena.transfer.errors import EngineUnavailable, RegistrationError, TransferFailed, TransferTimeout
from kvarena.transfer.nixl.install import load_nixl, slow_path_reason
from kvarena.transfer.nixl.peer import Description, NixlPeer, Place, RemoteRegion, status_of
from kvarena.transfer.protocol import Addresses, Capabilities, Pending, Region
from kvarena.transfer.registration.regions import overlapping

__all__ = ["NixlEngine"]

log = logging.getLogger(__name__)

_warned_of_slow_path = threading.Event()
# While a transfer runs: look this often, less and less.
_FIRST_POLL_SECONDS = 20e-6
_LAST_POLL_SECONDS = 1e-3


class NixlEngine:
    """A NIXL agent of this process, with the UCX backend.

    NIXL accepts overlapping regions, and a nested one then hides parts of the larger: here they are
    refused. A peer's metadata can only be added to, so a peer whose regions were replaced is removed
    and added again; one that only grew gets the addition.

    Parameters
    ----------
    memory : {"DRAM", "VRAM"}
        Where registered memory lives.
    device_id : int
        Of the GPU, for ``"VRAM"``.
    vmm, fabric : bool
        Whether the memory is mapped by CUDA's VMM, and with fabric handles. A combination that makes
        UCX fall back to emulation is warned of, once in a process.
    timeout : float
        Seconds after which a transfer is given up; NIXL itself would wait for ever.

    Raises
    ------
    EngineUnavailable
        NIXL is missing, broken or does not start.
    """

    def __init__(
        self,
        *,
        memory: Literal["DRAM", "VRAM"] = "DRAM",
        device_id: int = 0,
        vmm: bool = False,
        fabric: bool = False,
        timeout: float = 30.0,
        name: str = "nixl",
    ) -> None:
        self.name = name
        self.memory = memory
        self._place = Place(memory, device_id)
        self._timeout = timeout
        # UCX registers host memory by address, but of CUDA memory only the first handle of a range.
        self.capabilities = Capabilities(
            crosses_seams=False, spans_handles=memory == "DRAM", live_reregistration=True
        )
        api, self._bindings = load_nixl()
        self.agent_name = f"kvarena-{uuid.uuid4().hex}"
        try:
            self._agent = api.nixl_agent(
                self.agent_name,
                api.nixl_agent_config(
                    backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
                ),
            )
        except Exception as error:
            raise EngineUnavailable(
                "nixl",
                f"the agent does not start ({type(error).__name__}: {error})",
                fix="See UCX_LOG_LEVEL=info.",
            ) from error
        self._lock = threading.RLock()
        self._serials = itertools.count(1)
        self._held: dict[int, tuple[Region, int, Any]] = {}
        self._peers: dict[str, NixlPeer] = {}
        self._closed = False
        reason = slow_path_reason(memory=memory, vmm=vmm, fabric=fabric)
        if reason is not None and not _warned_of_slow_path.is_set():
            _warned_of_slow_path.set()
            log.warning("%s: %s", name, reason)

    def register(self, regions: Sequence[Region]) -> None:
        """All or nothing; overlaps are refused."""
        with self._lock:
            done: list[Region] = []
            try:
                for region in regions:
                    self._register(region)
                    done.append(region)
            except RegistrationError:
                for region in reversed(done):
                    self._deregister(region)
                raise

    def unregister(self, regions: Sequence[Region]) -> None:
        """All or nothing; address and length must be those of a registration."""
        with self._lock:
            for index, region in enumerate(regions):
                if self._held.get(region.address, (None,))[0] != region or region in regions[:index]:
                    raise RegistrationError(
                        self.name,
                        region,
                        None,
                        action="unregister",
                        meaning="this engine did not register it",
                        unknown=True,
                    )
            done: list[Region] = []
            try:
                for region in regions:
                    self._deregister(region)
                    done.append(region)
            except RegistrationError:
                for region in reversed(done):
                    self._register(region)
                raise

    def describe(self) -> bytes:
        """The agent's name and connection, and the metadata of each region by itself."""
        with self._lock:
            self._refuse_if_closed("?")
            nothing = self._bindings.nixlRegDList(self._bindings.DRAM_SEG)
            return msgspec.msgpack.encode(
                Description(
                    agent=self.agent_name,
                    connection=self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True),
                    place=self._place,
                    regions=tuple(
                        RemoteRegion(*region, serial, self._agent.get_partial_agent_metadata(descriptors))
                        for region, serial, descriptors in self._held.values()
                    ),
                )
            )

    def connect(self, description: bytes) -> str:
        """The peer's agent name. Raises `TransferFailed` if NIXL cannot take the description.

        A peer that is known already is refreshed after the transfers that are under way to it.
        """
        try:
            theirs = msgspec.msgpack.decode(description, type=Description)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TransferFailed(self.name, "?", None, f"not a NIXL description: {error}") from error
        if theirs.engine != "nixl" or theirs.agent == self.agent_name:
            raise TransferFailed(self.name, theirs.agent, None, "not another NIXL agent")
        with self._lock:
            self._refuse_if_closed(theirs.agent)
            peer = self._peers.get(theirs.agent)
            if peer is None or peer.gone.is_set() or peer.place != theirs.place:
                self.disconnect(theirs.agent)
                peer = self._peers[theirs.agent] = NixlPeer(theirs.agent, theirs.place)
        job = WorkerJob(self.name, theirs.agent, 0, lambda: self._load(peer, theirs))
        peer.worker.put(job)
        try:
            job.wait(self._timeout)
        except (TransferFailed, TransferTimeout) as error:
            self.disconnect(theirs.agent)
            if isinstance(error, TransferFailed):
                raise
            raise TransferFailed(self.name, theirs.agent, "TIMEOUT", str(error)) from error
        return theirs.agent

    def disconnect(self, peer: str) -> None:
        """Forget a peer and its metadata; transfers under way are cancelled."""
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            known.gone.set()
            known.worker.stop(self._timeout)
            self._forget(peer, known)

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Pending:
        """Start writing; one descriptor an operation, and none may cross a seam."""
        sources, targets, counts = check_columns(self.name, peer, src, dst, lengths)
        self._refuse_if_closed(peer)
        with self._lock:
            known = self._peers.get(peer)
        if known is None or known.gone.is_set():
            raise TransferFailed(self.name, peer, None, "not connected", operations=len(sources))
        local, remote = self._place.rows(sources, counts), known.place.rows(targets, counts)
        job = WorkerJob(self.name, peer, len(local), lambda: self._write(known, peer, local, remote))
        known.worker.put(job)
        return job

    def close(self) -> None:
        """Let go of peers, regions and the agent; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for peer in tuple(self._peers):
            self.disconnect(peer)
        with self._lock:
            for region, _, _ in tuple(self._held.values()):
                try:
                    self._deregister(region)
                except RegistrationError as error:
                    log.warning("%s", error)
            self._held.clear()
            self._agent = None

    def _register(self, region: Region) -> None:
        why = ""
        if self._closed:
            why = "the engine is closed"
        elif region.nbytes <= 0:
            why = "an empty region"
        elif other := overlapping(region, (held for held, _, _ in self._held.values())):
            why = f"overlaps {other}, and NIXL would lose parts of the larger one"
        if why:
            raise RegistrationError(self.name, region, None, meaning=why)
        try:
            descriptors = self._agent.register_memory([(*region, self._place.device_id, "")], self.memory)
        except Exception as error:
            raise RegistrationError(self.name, region, status_of(error), meaning=str(error)) from error
        self._held[region.address] = (region, next(self._serials), descriptors)

    def _deregister(self, region: Region) -> None:
        try:
            self._agent.deregister_memory(self._held[region.address][2])
        except Exception as error:
            raise RegistrationError(
                self.name, region, status_of(error), action="unregister", meaning=str(error)
            ) from error
        del self._held[region.address]

    def _load(self, peer: NixlPeer, theirs: Description) -> None:
        """Bring NIXL's metadata of a peer up to date, on the peer's thread."""
        serials = {region.serial for region in theirs.regions}
        try:
            if not peer.loaded <= serials:
                self._agent.remove_remote_agent(theirs.agent)
                peer.loaded.clear()
            if not peer.loaded:
                self._agent.add_remote_agent(theirs.connection)
            for region in theirs.regions:
                if region.serial not in peer.loaded:
                    self._agent.add_remote_agent(region.metadata)
                    peer.loaded.add(region.serial)
        except Exception as error:
            raise TransferFailed(self.name, theirs.agent, status_of(error), str(error)) from error

    def _forget(self, agent: str, peer: NixlPeer) -> None:
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:  # noqa: BLE001 - after a disconnect NIXL has forgotten it by itself
            log.debug("%s: %s: %s", self.name, agent, error)

    def _write(
        self, peer: NixlPeer, agent: str, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]
    ) -> None:
        """Write one batch, on the peer's thread."""
        if len(local) == 0:
            return
        handle = None
        deadline = time.monotonic() + self._timeout
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local, self.memory),
                self._agent.get_xfer_descs(remote, peer.place.memory),
                agent,
            )
            state, pause = self._agent.transfer(handle), _FIRST_POLL_SECONDS
            while state == "PROC" and not peer.gone.is_set() and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, _LAST_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            code = status_of(error)
            if code == "REMOTE_DISCONNECT":  # NIXL has dropped its metadata
                peer.gone.set()
            raise TransferFailed(self.name, agent, code, str(error), operations=len(local)) from error
        finally:
            if handle is not None:
                self._release(handle)
        if state != "DONE":
            hung = state == "PROC" and not peer.gone.is_set()
            code = "TIMEOUT" if hung else "CANCELLED" if state == "PROC" else state
            why = f"no end after {self._timeout:g} s" if hung else ""
            raise TransferFailed(self.name, agent, code, why, operations=len(local))

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except Exception as error:  # noqa: BLE001 - NIXL keeps it, and tries again at the end
            log.warning("%s: a transfer handle could not be released: %s", self.name, error)

    def _refuse_if_closed(self, peer: str) -> None:
        if self._closed:
            raise TransferFailed(self.name, peer, None, "the engine is closed")
