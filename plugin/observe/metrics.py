"""Prometheus metrics, read from the pool at the moment of the scrape.

An engine that has a registry of its own mounts the collector there::

    from kvarena.plugin.observe.metrics import ArenaCollector
    registry.register(ArenaCollector(lifecycle.reporter))

``KVARENA_METRICS_PORT`` serves a process that has none.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Final, final
from wsgiref.simple_server import WSGIServer

from kvarena.plugin.config import ConfigError
from kvarena.plugin.observe.status.model import EngineStatus, PoolStatus, SubPoolStatus
from kvarena.plugin.observe.status.reporter import StatusReporter
from kvarena.plugin.observe.timeline import Event
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["ArenaCollector", "MetricsPortError", "MetricsServer", "make_registry", "serve_metrics"]

# One handle over 136 GiB takes 4 ms on an H200 and its zeroing 43; thousands of handles take seconds.
_FINALIZE_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class MetricsPortError(ConfigError):
    """The port of ``KVARENA_METRICS_PORT`` cannot be listened on."""


@final
class ArenaCollector(Collector):
    """Every metric of one pool. Nothing is counted between scrapes that the pool does not count itself.

    Parameters
    ----------
    reporter : StatusReporter
        Of the pool; `PoolLifecycle.reporter`.
    """

    def __init__(self, reporter: StatusReporter) -> None:
        self._reporter = reporter

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry would otherwise scrape at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        pool = self._reporter.pool_status()
        yield from _memory(pool)
        yield from _sub_pools(pool.sub_pools)
        yield from _engines(pool.engines)
        yield from _decisions(list(self._reporter.timeline.events))


@final
class MetricsServer:
    """Serves one registry over HTTP.

    Attributes
    ----------
    port : int
        The one that it listens on.
    """

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self.port = int(server.server_port)
        self._server = server
        self._thread = thread

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def make_registry(reporter: StatusReporter) -> CollectorRegistry:
    """A registry that holds the metrics of one pool, and nothing else."""
    registry = CollectorRegistry()
    registry.register(ArenaCollector(reporter))
    return registry


def serve_metrics(reporter: StatusReporter, port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of one pool at ``http://<host>:<port>/metrics``.

    Parameters
    ----------
    reporter : StatusReporter
        Of the pool; it is told the address, for ``kvarena status``.
    port : int
        0: a free one.
    host : str
        Whose address to listen on; by default only this host can read them.

    Raises
    ------
    MetricsPortError
        The port is taken, or not ours to take; or the address is none of this host.
    """
    try:
        server, thread = start_http_server(port, addr=host, registry=make_registry(reporter))
    except (OSError, OverflowError, UnicodeError) as error:  # the last of a name that cannot be one
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "in use" if taken else f"not available ({getattr(error, 'strerror', None) or error})"
        raise MetricsPortError(
            f"port {port} of {host} is {why}, so no metrics can be served.",
            fix="Set KVARENA_METRICS_PORT to another port, or to 0 for a free one; KVARENA_METRICS_HOST "
            "must be an address of this host.",
        ) from error
    served = MetricsServer(server, thread)
    # Of IPv6 in brackets, as in any URL.
    reporter.metrics_address = f"[{host}]:{served.port}" if ":" in host else f"{host}:{served.port}"
    return served


def _memory(pool: PoolStatus) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "kvarena_pool_info", "1; what the pool is.", labels=("state", "device", "driver")
    )
    info.add_metric((pool.state, pool.device, pool.driver), 1)
    yield info
    for name, what, value in (
        ("reserved_bytes", "Addresses set aside for the arena.", pool.reserved_bytes),
        ("backed_bytes", "Bytes of the arena that have memory.", pool.backed_bytes),
        ("active_bytes", "Backed bytes that the pool uses: its size, or the sink before.", pool.active_bytes),
        ("sink_bytes", "Bytes that captured graphs write dummy KV to.", pool.sink_bytes),
        ("handles", "Physical allocations behind the arena.", len(pool.handle_bytes)),
    ):
        yield GaugeMetricFamily(f"kvarena_{name}", what, value=value)
    for name, what, known in (
        ("capacity_tokens", "Tokens that the pool is sized for, by its attention sub-pools.", pool.tokens),
        ("capacity_requests", "Requests whose states fit; absent without states.", pool.requests),
        (
            "torch_cached_bytes",
            "Free blocks that torch keeps; no driver call sees them.",
            pool.torch_cached_bytes,
        ),
    ):
        if known is not None:
            yield GaugeMetricFamily(f"kvarena_{name}", what, value=known)


def _sub_pools(sub_pools: Sequence[SubPoolStatus]) -> Iterator[Metric]:
    live = GaugeMetricFamily("kvarena_live_pages", "Pages in use.", labels=("sub_pool",))
    free = GaugeMetricFamily(
        "kvarena_free_pages", "Pages that could be allocated now; sub-pools share them.", labels=("sub_pool",)
    )
    size = GaugeMetricFamily("kvarena_page_bytes", "Bytes of a page, all layers.", labels=("sub_pool",))
    for each in sub_pools:
        size.add_metric((each.name,), each.page_bytes)
        if each.live_pages is not None and each.free_pages is not None:
            live.add_metric((each.name,), each.live_pages)
            free.add_metric((each.name,), each.free_pages)
    yield from (live, free, size)


def _engines(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    labels = ("engine",)
    registered = GaugeMetricFamily(
        "kvarena_registered_bytes", "Bytes that a transfer engine has registered.", labels=labels
    )
    regions = GaugeMetricFamily("kvarena_registered_regions", "Regions of them.", labels=labels)
    epoch = GaugeMetricFamily(
        "kvarena_registration_epoch", "Grows with every change of the registrations.", labels=labels
    )
    in_flight = GaugeMetricFamily(
        "kvarena_transfers_in_flight", "Transfers, or leases granted, that have not ended.", labels=labels
    )
    transfers = CounterMetricFamily("kvarena_transfers", "Transfers submitted.", labels=labels)
    moved = CounterMetricFamily("kvarena_transferred_bytes", "Bytes written to peers.", labels=labels)
    failed = CounterMetricFamily("kvarena_transfer_failures", "Transfers that failed.", labels=labels)
    for each in engines:
        for family, value in (
            (registered, each.registered_bytes),
            (regions, len(each.regions)),
            (epoch, each.epoch),
            (in_flight, each.in_flight),
            (transfers, each.transfers),
            (moved, each.transferred_bytes),
            (failed, each.failures),
        ):
            family.add_metric((each.name,), value)
    yield from (registered, regions, epoch, in_flight, transfers, moved, failed)


def _decisions(events: Sequence[Event]) -> Iterator[Metric]:
    refusals = CounterMetricFamily(
        "kvarena_refusals", "Reasons why the pool is not sized after capture.", labels=("reason",)
    )
    counts: dict[str, int] = {}
    for event in events:
        if event.name == "refused":
            reason = str(event.details.get("code", "unknown"))
            counts[reason] = counts.get(reason, 0) + 1
    for reason, count in sorted(counts.items()):
        refusals.add_metric((reason,), count)
    yield refusals
    seconds = [(event.milliseconds or 0.0) / 1e3 for event in events if event.name == "finalized"]
    bounds = (*_FINALIZE_BOUNDS_S, float("inf"))
    yield HistogramMetricFamily(
        "kvarena_finalize_seconds",
        "Backing the final size, and resizing the allocators.",
        buckets=[
            ("+Inf" if bound == float("inf") else str(bound), sum(each <= bound for each in seconds))
            for bound in bounds
        ],
        sum_value=sum(seconds),
    )
