"""Serves metrics over HTTP with a bounded number of connections, however many come and say nothing."""

from __future__ import annotations

import logging
import socket
import threading
from collections import OrderedDict
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any, Final, final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

__all__ = ["MAX_CONNECTIONS", "HttpServer"]

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 32
"""The oldest is closed when one more comes."""
_SILENCE_S: Final = 5.0


@final
class HttpServer:
    """Listens until it is closed.

    Parameters
    ----------
    host : str
        An address of this host.
    port : int
        0: a free one.
    registry : CollectorRegistry
        What is served.

    Raises
    ------
    OSError, OverflowError, UnicodeError
        The address or the port cannot be listened on.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        if not 0 <= port <= 65535:  # getaddrinfo would cut it to 16 bits
            raise OverflowError("a port is a number from 0 to 65535")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        kind = type("_Server", (_Server,), {"address_family": family})
        self._server = kind(address[:2], _Handler)
        self._server.set_app(make_wsgi_app(registry))
        self.port = int(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, name="kvarena-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        if self._thread.is_alive():  # not so in a forked child, where nobody would answer
            self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: OrderedDict[int, socket.socket] = OrderedDict()
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(blocking=False):
            self._close_oldest()
            # Its thread wakes up, and makes room; a scrape under way there is cut short by a flood only.
            if self._free.acquire(timeout=1.0):
                break
        with self._lock:
            self._open[id(request)] = request
        try:
            super().process_request(request, client_address)
        except BaseException:  # no more threads
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection to the metrics port failed", exc_info=True)

    def _close_oldest(self) -> None:
        with self._lock:
            if not self._open:
                return
            _, oldest = self._open.popitem(last=False)
            self._open[id(oldest)] = oldest  # last in the queue, if its thread does not end
            try:
                oldest.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def _leave(self, request: Any) -> None:
        with self._lock:
            if self._open.pop(id(request), None) is None:
                return
        self._free.release()
