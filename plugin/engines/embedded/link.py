"""Sockets that carry the control messages, and know when a peer was last heard."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Final

import msgspec
import zmq
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.control import Message, Ping

__all__ = ["AddressInUse", "Hub", "Spoke"]

logger = logging.getLogger(__name__)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)
_LINGER_MS: Final = 1000


class AddressInUse(KvArenaError):
    """An address that cannot be listened on: its port is taken, or it is none of this host."""


class _Socket:
    _socket: zmq.Socket[bytes]

    def __init__(self, kind: int) -> None:
        # One context for each socket: a process has few, and closing one must not touch another's.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = _LINGER_MS
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._last_ping = time.monotonic()

    @property
    def raw(self) -> zmq.Socket[bytes]:
        """The socket, to be polled beside others."""
        return self._socket

    def close(self) -> None:
        """Send what is queued, for up to a second, then let go; a second call does nothing."""
        if not self._socket.closed:
            self._poller.unregister(self._socket)
            self._socket.close()
            self._context.term()

    def _frames(self, timeout: float) -> list[list[bytes]]:
        if not self._poller.poll(max(0, int(timeout * 1000))):
            return []
        frames = []
        while True:
            try:
                frames.append(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return frames

    def _ping_due(self, every: float) -> bool:
        now = time.monotonic()
        if now - self._last_ping < every:
            return False
        self._last_ping = now
        return True


class Hub(_Socket):
    """Listens; many peers may come.

    Parameters
    ----------
    host : str
        Address to listen on.
    port : int
        0: a free one.
    path : str, optional
        Of a Unix socket to listen on instead: it is reached from every network namespace of this machine.

    Raises
    ------
    AddressInUse
        Something else listens there, or the host is not this one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, path: str | None = None) -> None:
        super().__init__(zmq.ROUTER)
        # Without it, a message to a peer that is gone would vanish.
        self._socket.router_mandatory = True
        self.last_heard: dict[bytes, float] = {}
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}" if path is None else f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise AddressInUse(
                f"cannot listen on {path or f'{host}:{port}'}: {error.strerror}.",
                fix="Give another port, or 0 for a free one."
                if port
                else "Give an address of this host; a decode worker listens on KVARENA_TRANSFER_HOST.",
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, message: Message) -> bool:
        """Send; False if the peer is gone."""
        try:
            self._socket.send_multipart([peer, _encoder.encode(message)], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError) as error:
            logger.debug("peer %s is gone: %s", peer.hex(), error)
            return False
        return True

    def receive(self, timeout: float = 0.0) -> list[tuple[bytes, Message]]:
        """Everything that has arrived, waiting up to `timeout` seconds for the first."""
        received: list[tuple[bytes, Message]] = []
        for peer, *body in self._frames(timeout):
            message = _decode(body)
            if message is not None:
                self.last_heard[peer] = time.monotonic()
                received.append((peer, message))
        return received

    def ping(self, every: float) -> None:
        """Tell every peer that this process lives, if it is time to."""
        if self._ping_due(every):
            for peer in list(self.last_heard):
                self.send(peer, Ping())

    def silence(self, peer: bytes) -> float:
        """Seconds since a peer was heard."""
        return time.monotonic() - self.last_heard[peer]

    def forget(self, peer: bytes) -> None:
        """Stop pinging a peer; it may come again."""
        self.last_heard.pop(peer, None)


class Spoke(_Socket):
    """Talks to one hub.

    Parameters
    ----------
    address : str
        The hub's.
    identity : bytes, optional
        How the hub knows this peer; by default the hub makes one up.
    """

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        super().__init__(zmq.DEALER)
        if identity is not None:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self.address = address
        self._heard = time.monotonic()
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        """Send; queued while the hub cannot be reached."""
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("the queue to %s is full", self.address)

    def receive(self, timeout: float = 0.0) -> list[Message]:
        """Everything that has arrived, waiting up to `timeout` seconds for the first."""
        received: list[Message] = []
        for body in self._frames(timeout):
            self._heard = time.monotonic()
            message = _decode(body)
            if message is not None:
                received.append(message)
        return received

    def ping(self, every: float) -> None:
        """Tell the hub that this process lives, if it is time to."""
        if self._ping_due(every):
            self.send(Ping())

    def silence(self) -> float:
        """Seconds since the hub was heard."""
        return time.monotonic() - self._heard

    def __enter__(self) -> Spoke:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _decode(body: list[bytes]) -> Message | None:
    try:
        message: Message = _decoder.decode(b"".join(body))
    except (msgspec.DecodeError, RecursionError) as error:
        # Whoever else connects to the port must not be able to end the engine.
        logger.warning("a message that is none of ours was dropped: %s", error)
        return None
    return message
