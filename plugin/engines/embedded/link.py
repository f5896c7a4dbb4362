"""Sockets that carry the control messages, and know when a peer was last heard."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import zmq
from kvarena.errors import DescriptorLimitError
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.access import Access, AddressInUse, tcp_endpoint
from kvarena.plugin.engines.embedded.clock import AwakeClock
from kvarena.plugin.engines.embedded.codec import Codec
from zmq.utils.monitor import recv_monitor_message

__all__ = ["Hub", "Spoke"]

logger = logging.getLogger(__name__)

_LINGER_MS: Final = 1000
# What one step of a server takes from a socket at most: a peer that floods it must not hold the step.
_MAX_TURN: Final = 128
# A connection that does not complete its handshake is closed: strangers hold no descriptors for long.
_HANDSHAKE_MS: Final = 5000
# Of one context and its socket, with some to spare.
_DESCRIPTORS: Final = 16

_Self = TypeVar("_Self", bound="_Socket")


class _Socket:
    _socket: zmq.Socket[bytes]

    def __init__(self, kind: int, codec: Codec, clock: AwakeClock | None) -> None:
        _check_descriptors()
        self._codec = codec
        self._clock = clock or AwakeClock()
        self._last_ping = time.monotonic()
        self._closing = ExitStack()
        with ExitStack() as undo:
            # One context for each socket: a process has few, and closing one must not touch another's.
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            # Closes the socket, and its monitor's: one left open would keep the context from ending.
            undo.callback(self._context.destroy)
            self._socket = self._context.socket(kind)
            self._socket.linger = _LINGER_MS
            self._socket.maxmsgsize = codec.receives.max_bytes
            self._socket.rcvhwm = codec.receives.max_queued
            self._socket.handshake_ivl = _HANDSHAKE_MS
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._closing = undo.pop_all()

    @property
    def raw(self) -> zmq.Socket[bytes]:
        """The socket, to be polled beside others."""
        return self._socket

    def close(self) -> None:
        """Send what is queued, for up to a second, then let go; a second call does nothing."""
        self._closing.close()

    def ping(self, every: float) -> None:
        """Give a sign of life, if the last one is `every` seconds old."""
        raise NotImplementedError

    @contextmanager
    def kept_alive(self, every: float) -> Iterator[None]:
        """Go on giving signs of life while the caller's thread waits for something else.

        The caller does not use the socket within the block; a thread of its own does (zmq_socket(3): a socket
        may pass from one thread to another with a full fence, which starting and joining a thread are).
        """
        ended = threading.Event()

        def go_on() -> None:
            while not ended.wait(every):
                self.ping(every)

        thread = threading.Thread(target=go_on, name="kvarena-signs-of-life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _frames(self, timeout: float) -> Iterator[list[bytes]]:
        """At most one turn of messages; what is left is there at the next turn."""
        self._clock.tick()
        if not self._poller.poll(max(0, int(timeout * 1000))):
            return
        self._clock.tick()
        for _ in range(_MAX_TURN):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _ping_due(self, every: float) -> bool:
        now = time.monotonic()
        if now - self._last_ping < every:
            return False
        self._last_ping = now
        return True

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Hub(_Socket):
    """Listens; many peers may come.

    Parameters
    ----------
    endpoint : str
        ``ipc://<path>`` (see `local_endpoint`), or a host to listen on over TCP.
    port : int
        Of TCP; 0: a free one.
    access : Access
        How peers over TCP are known.
    codec : Codec, optional
        By default a client's.
    clock : AwakeClock, optional
        By which silence is counted.

    Raises
    ------
    AddressInUse
        Something else listens there, or the host is not this one.
    ControlRefused
        Anybody could connect.
    DescriptorLimitError
        No descriptors are left.
    """

    def __init__(
        self,
        endpoint: str,
        port: int = 0,
        *,
        access: Access | None = None,
        codec: Codec | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        super().__init__(zmq.ROUTER, codec or Codec(control.TO_WORKER, control.TO_CLIENT), clock)
        with ExitStack() as undo:
            undo.callback(self.close)
            # Without it, a message to a peer that is gone would vanish.
            self._socket.router_mandatory = True
            self.last_heard: dict[bytes, float] = {}
            """By the clock, of each peer that has said anything; see `forget`."""
            self.keeps_strangers_out = True
            """Whether whoever speaks here could enter our directory, or knows our secret."""
            self._closed_by_peer: set[bytes] = set()
            if not endpoint.startswith("ipc://"):
                self.keeps_strangers_out = (access or Access()).guard_hub(self._socket, endpoint)
                self._socket.ipv6 = ":" in endpoint
                self._bind(tcp_endpoint(endpoint, port), f"{endpoint}:{port}", port)
            else:
                path = Path(endpoint.removeprefix("ipc://"))
                self._bind(endpoint, str(path), port)
                # libzmq leaves it there.
                self._closing.callback(path.unlink, missing_ok=True)
            self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            undo.pop_all()

    def send(self, peer: bytes, message: control.Message) -> bool:
        """Send; False if the peer is gone, or takes nothing.

        Raises
        ------
        MessageTooLarge
            The peer would end the connection.
        """
        try:
            self._socket.send_multipart([peer, self._codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._closed_by_peer.add(peer)
            logger.debug("nothing can be sent to peer %s: %s", peer.hex(), error)
            return False
        return True

    def receive(self, timeout: float = 0.0) -> list[tuple[bytes, control.Message]]:
        """What has arrived, at most 128 messages, waiting up to `timeout` seconds for the first."""
        received: list[tuple[bytes, control.Message]] = []
        for peer, *body in self._frames(timeout):
            message = self._codec.decode(body)
            if message is not None:
                self.last_heard[peer] = self._clock.now()
                received.append((peer, message))
        return received

    def ping(self, every: float) -> None:
        """Tell every peer that this process lives, if it is time to."""
        if self._ping_due(every):
            for peer in list(self.last_heard):
                self.send(peer, control.Ping())

    def take_closed(self) -> set[bytes]:
        """Peers whose connections were found closed since the last call; earlier messages may be unread."""
        closed, self._closed_by_peer = self._closed_by_peer, set()
        return closed

    def silence(self, peer: bytes) -> float:
        """Seconds since a peer was heard, those not counted in which this process did not run."""
        return self._clock.now() - self.last_heard[peer]

    def forget(self, peer: bytes) -> None:
        """Stop pinging a peer; it may come again."""
        self.last_heard.pop(peer, None)

    def _bind(self, endpoint: str, shown: str, port: int) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise AddressInUse(
                f"cannot listen on {shown}: {error.strerror}.",
                fix="Give another port, or 0 for a free one."
                if port
                else "Give an address of this host; a decode worker listens on KVARENA_TRANSFER_HOST.",
            ) from error


class Spoke(_Socket):
    """Talks to one hub.

    Parameters
    ----------
    address : str
        The hub's.
    identity : bytes, optional
        How the hub knows this peer; by default the hub makes one up.
    access : Access
        How this process shows over TCP that it may speak.
    codec : Codec, optional
        By default a worker's.
    clock : AwakeClock, optional
        By which silence is counted.

    Raises
    ------
    ControlRefused
        A TCP address, and no secret.
    DescriptorLimitError
        No descriptors are left.
    """

    def __init__(
        self,
        address: str,
        identity: bytes | None = None,
        *,
        access: Access | None = None,
        codec: Codec | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        super().__init__(zmq.DEALER, codec or Codec(control.TO_CLIENT, control.TO_WORKER), clock)
        with ExitStack() as undo:
            undo.callback(self.close)
            if identity is not None:
                self._socket.setsockopt(zmq.IDENTITY, identity)
            # What is said here is bounded by the work that the hub has given.
            self._socket.sndhwm = 0
            if not address.startswith("ipc://"):
                (access or Access()).guard_spoke(self._socket, address)
                self._socket.ipv6 = "[" in address
            self.address = address
            self._heard = self._clock.now()
            self.heard = False
            """Whether the hub has said anything yet."""
            self.closed_by_peer = False
            """Whether the hub has closed the connection, as `receive` found before it looked for messages."""
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._closing.callback(self._socket.disable_monitor)
            try:
                self._socket.connect(address)
            except zmq.ZMQError as error:
                raise AddressInUse(
                    f"cannot connect to {address}: {error.strerror}.", fix="Give the address of a hub."
                ) from error
            undo.pop_all()

    def send(self, message: control.Message) -> None:
        """Send; queued while the hub cannot be reached. Raises `MessageTooLarge`."""
        self._socket.send(self._codec.encode(message))

    def receive(self, timeout: float = 0.0) -> list[control.Message]:
        """What has arrived, at most 128 messages, waiting up to `timeout` seconds for the first."""
        self._look_for_the_end()
        received: list[control.Message] = []
        for body in self._frames(timeout):
            self._heard, self.heard = self._clock.now(), True
            message = self._codec.decode(body)
            if message is not None:
                received.append(message)
        return received

    def ping(self, every: float) -> None:
        """Tell the hub that this process lives, if it is time to."""
        if self._ping_due(every):
            self.send(control.Ping())

    def silence(self) -> float:
        """Seconds since the hub was heard, those not counted in which this process did not run."""
        return self._clock.now() - self._heard

    def _look_for_the_end(self) -> None:
        try:
            while not self.closed_by_peer:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                # A hub that was never heard may have a connection that failed halfway: it is tried again.
                self.closed_by_peer = self.heard
        except zmq.Again:
            return


def _check_descriptors() -> None:
    """libzmq aborts the process where it cannot open one of those that it needs."""
    probes: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            probes.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        DescriptorLimitError.raise_for(error, "opening a control socket")
        raise
    finally:
        for probe in probes:
            os.close(probe)
