"""One thread that serves an engine's sockets, and channels that may be written to from any thread."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from kvarena.transfer.same_host.errors import WireError
from kvarena.transfer.same_host.wire import Packet, PacketKind, encode, receive, transmit

__all__ = ["Channel", "ChannelClosed", "SocketLoop"]

_log = logging.getLogger(__name__)

# A peer that reads nothing for this many packets is stopped or stuck: it is let go.
_BACKLOG_PACKETS = 4096
# Packets read from one channel before the others get their turn.
_TURN = 32
_TICK_SECONDS = 1.0


class ChannelClosed(Exception):
    """The other end is gone, or this end was closed; never leaves the engine."""


@final
class SocketLoop:
    """A daemon thread around a selector; what it calls must not raise.

    Parameters
    ----------
    name : str
        Of the thread.
    each_tick : callable, optional
        Called when nothing has happened for a second.
    """

    def __init__(self, name: str, each_tick: Callable[[], None] | None = None) -> None:
        self._each_tick = each_tick
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        # Those that are watched, or will be when the thread comes to it: a forked child has them all.
        self._sockets: set[socket.socket] = set()
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain)
        self._wake_lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._selector.close()
            os.close(self._wake_in)
            os.close(self._wake_out)
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def watch(
        self, sock: socket.socket, ready: Callable[[int], None], events: int = selectors.EVENT_READ
    ) -> None:
        """Call `ready` with the events of a socket, from now on or with these events from now on."""

        def change() -> None:
            if sock.fileno() < 0:  # forgotten meanwhile
                self._sockets.discard(sock)
                return
            with contextlib.suppress(ValueError, OSError):
                try:
                    self._selector.modify(sock, events, ready)
                except KeyError:
                    self._selector.register(sock, events, ready)

        self._sockets.add(sock)
        self.call(change)

    def forget(self, sock: socket.socket) -> None:
        """Close a socket once nothing can be called for it any more."""

        def drop() -> None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
            self._sockets.discard(sock)

        self.call(drop)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the loop's thread, soon; at once if this is that thread."""
        if self.is_current:
            function()
            return
        self._calls.append(function)
        self._wake()

    def later(self, function: Callable[[], None]) -> None:
        """The same, but never at once: the caller may hold what the function waits for."""
        self._calls.append(function)
        self._wake()

    def close(self) -> None:
        """End the thread, after the calls that it was given."""
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        if not self.is_current:
            self._thread.join()
        with self._wake_lock:
            os.close(self._wake_out)
            self._wake_out = -1  # the number may soon be another file's, and who is late would write there

    def leave_to_parent(self) -> None:
        """In a forked child: close the descriptors; nobody who is connected to the parent is told."""
        self._stopping = True
        self._selector.close()  # first: to unregister anything would do so for the parent, too
        for sock in self._sockets:
            sock.close()
        os.close(self._wake_in)
        os.close(self._wake_out)
        self._wake_lock, self._wake_out = threading.Lock(), -1  # a thread that is not here may hold the other

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError), self._wake_lock:
            os.write(self._wake_out, b"x")

    def _drain(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_in, 4096)

    def _run(self) -> None:
        while True:
            while self._calls:
                self._guard(self._calls.popleft())
            if self._stopping and not self._calls:
                break
            ready = self._selector.select(None if self._each_tick is None else _TICK_SECONDS)
            if self._each_tick is not None and not ready:
                self._guard(self._each_tick)
            for key, events in ready:
                self._guard(lambda key=key, events=events: key.data(events))  # type: ignore[misc]
        self._selector.close()
        os.close(self._wake_in)

    @staticmethod
    def _guard(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:  # noqa: BLE001 - a thread that serves others must live on
            _log.exception("a same-host socket's handler failed")


@final
class Channel:
    """A connection to one peer.

    Parameters
    ----------
    loop : SocketLoop
        Reads it.
    sock : socket.socket
        Connected; owned by the channel from now on.
    on_packet : callable
        Gets each packet in the loop's thread and owns its descriptors. A `WireError` that it raises
        ends the channel.
    on_end : callable
        Called once with the reason, in the loop's thread, or in that of `close`.
    """

    def __init__(
        self,
        loop: SocketLoop,
        sock: socket.socket,
        on_packet: Callable[[Packet], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_packet = on_packet
        self._on_end = on_end
        self._lock = threading.Lock()
        self._backlog: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._open = True
        self._fd = sock.fileno()

    @property
    def is_hung_up(self) -> bool:
        """Whether the other end is gone, even if the loop has not come to know it yet; a system call."""
        if not self._open:
            return True
        # One for each call: a poll object refuses to be asked by two threads at once.
        hangup = select.poll()
        hangup.register(self._fd, select.POLLRDHUP)
        return bool(hangup.poll(0))

    @property
    def is_open(self) -> bool:
        """Whether packets can be sent."""
        return self._open

    def start(self) -> None:
        """Begin to read."""
        self._sock.setblocking(False)
        self._loop.watch(self._sock, self._ready)

    def send(self, kind: PacketKind, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a packet, now or when the peer reads again; never blocks. Descriptors stay the caller's.

        Raises
        ------
        ChannelClosed
            It cannot be sent any more.
        """
        data = encode(kind, body)
        with self._lock:
            if not self._open:
                raise ChannelClosed
            try:
                if not self._backlog and self._transmit(data, fds):
                    return
                if len(self._backlog) < _BACKLOG_PACKETS:
                    self._backlog.append((data, _dup_all(fds)))
                    self._loop.watch(self._sock, self._ready, selectors.EVENT_READ | selectors.EVENT_WRITE)
                    return
                why = f"it left {_BACKLOG_PACKETS} packets unread"
            except ConnectionError as error:
                # The reader will find the end of the connection, too, and tell why.
                raise ChannelClosed from error
            except OSError as error:
                why = _unsent(error)
        # Not here: the caller may hold what the end of the channel waits for.
        self._loop.later(lambda: self.close(why))
        raise ChannelClosed

    def close(self, reason: str) -> None:
        """End the connection; a second call does nothing."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            unsent, self._backlog = self._backlog, deque()
        for _, fds in unsent:
            _close_all(fds)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # so that the peer knows even before the loop's turn
        self._loop.forget(self._sock)
        self._on_end(reason)

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if not events & selectors.EVENT_READ:
            return
        for _ in range(_TURN):
            if not self._open:
                return
            try:
                packet = receive(self._sock)
            except (BlockingIOError, InterruptedError):
                return
            except WireError as error:
                _log.warning("same-host: a connection is dropped: %s", error)
                self.close(str(error))
                return
            except ConnectionResetError:
                continue  # it died with packets unread; what it had sent before can still be read
            except OSError as error:
                self.close(error.strerror or str(error))
                return
            if packet is None:
                self.close("it closed the connection, or died")
                return
            self._handle(packet)

    def _handle(self, packet: Packet) -> None:
        try:
            self._on_packet(packet)
        except WireError as error:
            _log.warning("same-host: a connection is dropped: %s", error)
            self.close(str(error))
        except Exception as error:  # noqa: BLE001 - likewise
            _log.exception("same-host: a %s packet could not be handled", packet.kind.name)
            self.close(f"{packet.kind.name} could not be handled: {error}")

    def _flush(self) -> None:
        try:
            with self._lock:
                while self._backlog:
                    data, fds = self._backlog[0]
                    if not self._transmit(data, fds):
                        return
                    self._backlog.popleft()
                    _close_all(fds)
        except ConnectionError:
            pass  # likewise
        except OSError as error:
            self.close(_unsent(error))
        self._loop.watch(self._sock, self._ready, selectors.EVENT_READ)

    def _transmit(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            transmit(self._sock, data, fds)
        except BlockingIOError:
            return False
        return True


def _unsent(error: OSError) -> str:
    """Why to let a peer go that lives: it would never know what the packet says."""
    return f"a packet to it could not be sent: {error}"


def _dup_all(fds: Sequence[int]) -> tuple[int, ...]:
    own: list[int] = []
    try:
        for fd in fds:
            own.append(os.dup(fd))
    except OSError:
        _close_all(own)
        raise
    return tuple(own)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
