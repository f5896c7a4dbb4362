"""The engine: a listening thread that writes what peers send, where it is registered."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from kvarena.transfer import (
    Addresses,
    Capabilities,
    Region,
    RegistrationError,
    TransferFailed,
    TransferTimeout,
)

_HEADER = struct.Struct("!QQ")  # address and length of one operation; 0, 0 ends a batch
_DONE, _REFUSED = b"d", b"r"


class SocketPending:
    """A batch that is being sent."""

    def __init__(self, engine: str, peer: str, future: Future[None]) -> None:
        self._engine, self._peer, self._future = engine, peer, future

    def done(self) -> bool:
        """Whether it has ended well; raises `TransferFailed`."""
        if self._future.done():
            self._future.result()
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has ended; raises `TransferFailed` or `TransferTimeout`."""
        try:
            self._future.result(timeout)
        except FutureTimeout:
            raise TransferTimeout(self._engine, self._peer, timeout or 0.0) from None


class SocketEngine:
    """One listening socket for each process, one sending thread for each peer.

    Parameters
    ----------
    hostname : str
        The address at which peers reach this process.
    """

    name = "socket"
    # A target looks for one region around each write, so a copy must not cross a seam.
    capabilities = Capabilities(crosses_seams=False, spans_handles=True, live_reregistration=True)

    def __init__(self, hostname: str = "127.0.0.1") -> None:
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, tuple[socket.socket, ThreadPoolExecutor]] = {}
        self._accepted: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.create_server((hostname, 0))
        self._address = f"{hostname}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def register(self, regions: Sequence[Region]) -> None:
        """All or nothing: work on a copy, and keep it when every region fits."""
        with self._lock:
            after = dict(self._regions)
            for region in regions:
                if self._closed or region.nbytes <= 0:
                    why = "closed" if self._closed else "an empty region"
                    raise RegistrationError(self.name, region, None, meaning=why)
                for held in after.values():
                    if region.address < held.end and held.address < region.end:
                        raise RegistrationError(self.name, region, None, meaning=f"overlaps {held}")
                after[region.address] = region
            self._regions = after

    def unregister(self, regions: Sequence[Region]) -> None:
        """All or nothing, and only by the very keys that were registered."""
        with self._lock:
            after = dict(self._regions)
            for region in regions:
                if after.get(region.address) != region:
                    raise RegistrationError(
                        self.name, region, None, action="unregister", meaning="not registered", unknown=True
                    )
                del after[region.address]
            self._regions = after

    def describe(self) -> bytes:
        """Where this engine listens; its regions it checks itself."""
        return f"socket {self._address}".encode()

    def connect(self, description: bytes) -> str:
        """The peer's address; an open connection is kept."""
        word, _, peer = description.decode(errors="replace").partition(" ")
        host, _, port = peer.rpartition(":")
        if word != "socket" or not port.isdigit():
            raise TransferFailed(self.name, peer or "?", None, "not a description of a socket engine")
        if peer not in self._peers:
            try:
                connection = socket.create_connection((host, int(port)), timeout=10)
            except OSError as error:
                raise TransferFailed(self.name, peer, error.errno, str(error)) from error
            self._peers[peer] = connection, ThreadPoolExecutor(1)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer; an unknown one is no error."""
        if peer in self._peers:
            connection, sender = self._peers.pop(peer)
            _shut(connection)
            sender.shutdown()

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> SocketPending:
        """Hand the batch to the peer's thread."""
        operations = [(int(s), int(d), int(n)) for s, d, n in zip(src, dst, lengths, strict=True)]
        if self._closed or peer not in self._peers:
            why = "the engine is closed" if self._closed else "not connected"
            raise TransferFailed(self.name, peer, None, why, operations=len(operations))
        if any(min(operation) < 0 for operation in operations):
            raise TransferFailed(self.name, peer, None, "a negative address or length")
        connection, sender = self._peers[peer]
        return SocketPending(self.name, peer, sender.submit(self._send, connection, peer, operations))

    def close(self) -> None:
        """End every thread and socket; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for peer in tuple(self._peers):
            self.disconnect(peer)
        for one in (self._listener, *self._accepted):
            _shut(one)
        for thread in self._threads:
            thread.join()
        self._regions = {}

    def _send(self, connection: socket.socket, peer: str, operations: list[tuple[int, int, int]]) -> None:
        try:
            for source, target, nbytes in operations:
                connection.sendall(_HEADER.pack(target, nbytes))
                connection.sendall((ctypes.c_char * nbytes).from_address(source))
            connection.sendall(_HEADER.pack(0, 0))
            answer = connection.recv(1)
        except OSError as error:
            raise TransferFailed(
                self.name, peer, error.errno, str(error), operations=len(operations)
            ) from error
        if answer != _DONE:
            why = "outside the peer's regions" if answer == _REFUSED else "the peer has gone"
            raise TransferFailed(self.name, peer, None, why, operations=len(operations))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._accepted.append(connection)
            self._threads.append(threading.Thread(target=self._receive, args=(connection,), daemon=True))
            self._threads[-1].start()
            if self._closed:  # meanwhile, and who closes may not have seen this one
                _shut(connection)

    def _receive(self, connection: socket.socket) -> None:
        answer = _DONE
        try:
            while True:
                address, nbytes = _HEADER.unpack(_exactly(connection, _HEADER.size))
                if (address, nbytes) == (0, 0):
                    connection.sendall(answer)
                    answer = _DONE
                    continue
                with self._lock:  # what is being written is not unregistered meanwhile
                    if any(
                        r.address <= address and address + nbytes <= r.end for r in self._regions.values()
                    ):
                        connection.recv_into(
                            (ctypes.c_char * nbytes).from_address(address), nbytes, socket.MSG_WAITALL
                        )
                        continue
                answer = _REFUSED
                _exactly(connection, nbytes)
        except (OSError, EOFError):
            _shut(connection)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was not connected, or is no longer
        one.shutdown(socket.SHUT_RDWR)
    one.close()
