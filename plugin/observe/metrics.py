"""Prometheus metrics, read from the pool at the moment of the scrape.

An engine that has a registry of its own mounts each of its pools there::

    from kvarena.plugin.observe.metrics import mount
    mount(registry, lifecycle.reporter)

``KVARENA_METRICS_PORT`` serves a process that has none.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, final
from weakref import WeakKeyDictionary

from kvarena.plugin.config import ConfigError
from kvarena.plugin.observe.server import HttpServer
from kvarena.plugin.observe.status.model import EngineStatus, PoolStatus, SubPoolStatus
from kvarena.plugin.observe.status.reporter import StatusReporter
from kvarena.plugin.observe.tally import Tally
from kvarena.transfer.registration.traffic import Histogram
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = [
    "LABELS",
    "METRICS",
    "ArenaCollector",
    "MetricsPortError",
    "MetricsServer",
    "make_registry",
    "mount",
    "serve_metrics",
]

LABELS: Final = ("role", "model", "rank", "pool")
"""Every metric has these before its own; one that is not known is empty, which Prometheus takes as absent."""

_SUB_POOL: Final = ("sub_pool",)
_ENGINE: Final = ("engine",)
METRICS: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "kvarena_pool_info": ("gauge", "1; what the pool is.", ("state", "device", "driver")),
    "kvarena_reserved_bytes": ("gauge", "Addresses set aside for the arena.", ()),
    "kvarena_backed_bytes": ("gauge", "Bytes of the arena that have memory.", ()),
    "kvarena_active_bytes": ("gauge", "Backed bytes that the pool uses: its size, or the sink before.", ()),
    "kvarena_sink_bytes": ("gauge", "Bytes that captured graphs write dummy KV to.", ()),
    "kvarena_handles": ("gauge", "Physical allocations behind the arena.", ()),
    "kvarena_capacity_tokens": ("gauge", "Tokens that the attention sub-pools are sized for.", ()),
    "kvarena_capacity_requests": ("gauge", "Requests whose states fit; absent without states.", ()),
    "kvarena_torch_cached_bytes": ("gauge", "Free blocks that torch keeps; no driver call sees them.", ()),
    "kvarena_live_pages": ("gauge", "Pages in use.", _SUB_POOL),
    "kvarena_free_pages": ("gauge", "Pages that could be allocated now; sub-pools share them.", _SUB_POOL),
    "kvarena_total_pages": ("gauge", "Pages that fit if no other sub-pool held any.", _SUB_POOL),
    "kvarena_kv_usage_ratio": ("gauge", "Live pages of those that are live or free, 0 to 1.", _SUB_POOL),
    "kvarena_page_bytes": ("gauge", "Bytes of a page, all layers.", _SUB_POOL),
    "kvarena_registered_bytes": ("gauge", "Bytes that a transfer engine has registered.", _ENGINE),
    "kvarena_registered_regions": ("gauge", "Regions of them.", _ENGINE),
    "kvarena_registration_epoch": ("gauge", "Grows with every change of the registrations.", _ENGINE),
    "kvarena_transfers_in_flight": (
        "gauge",
        "Transfers, or leases granted, that have not ended.",
        _ENGINE,
    ),
    "kvarena_transfers": ("counter", "Transfers submitted, by the peer.", ("engine", "peer")),
    "kvarena_transferred_bytes": ("counter", "Bytes written to peers.", _ENGINE),
    "kvarena_received_bytes": ("counter", "Bytes of pages that peers have written here.", _ENGINE),
    "kvarena_transfer_failures": ("counter", "Transfers that failed.", _ENGINE),
    "kvarena_transfer_seconds": ("histogram", "From submission until the end was noticed.", _ENGINE),
    "kvarena_transfer_size_bytes": ("histogram", "Bytes of each transfer that ended well.", _ENGINE),
    "kvarena_refusals": ("counter", "Reasons why the pool is not sized after capture.", ("reason",)),
    "kvarena_finalize_seconds": ("histogram", "Backing the final size, and resizing the allocators.", ()),
}
"""Type, help and own labels of each; counters are scraped with ``_total`` behind the name."""

_FAMILIES: Final = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class MetricsPortError(ConfigError):
    """The port of ``KVARENA_METRICS_PORT`` cannot be listened on."""


@final
class ArenaCollector(Collector):
    """The metrics of one or several pools; nothing is counted that they do not count themselves.

    A registry takes one collector; further pools of a process are added to it, see `mount`.

    Parameters
    ----------
    *reporters : StatusReporter
        Of each pool; `PoolLifecycle.reporter`.
    """

    def __init__(self, *reporters: StatusReporter) -> None:
        self._reporters = list(reporters)

    def add(self, reporter: StatusReporter) -> None:
        """Show one more pool."""
        self._reporters.append(reporter)

    def remove(self, reporter: StatusReporter) -> None:
        """Show a pool no longer; one that is not shown is left out."""
        self._reporters = [each for each in self._reporters if each is not reporter]

    def describe(self) -> Iterator[Metric]:
        """Name every metric, so that a registry refuses a second collector of the same names."""
        return iter(_Families().all())

    def collect(self) -> Iterator[Metric]:
        """Answer a scrape: one family of each name, one series of each set of labels."""
        families = _Families()
        seen: set[tuple[str, ...]] = set()
        for reporter in list(self._reporters):
            pool = reporter.pool_status()
            families.labels = _unique(reporter, seen)
            families.add_pool(pool)
            families.add_sub_pools(pool.sub_pools)
            families.add_engines(pool.engines)
            families.add_decisions(reporter.tally)
        return iter(families.all())


@final
class MetricsServer:
    """Serves one registry over HTTP.

    Attributes
    ----------
    port : int
        The one that it listens on.
    """

    def __init__(self, server: HttpServer) -> None:
        self.port = server.port
        self._server = server

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        self._server.close()


_mounted: WeakKeyDictionary[CollectorRegistry, ArenaCollector] = WeakKeyDictionary()


def mount(registry: CollectorRegistry, reporter: StatusReporter) -> ArenaCollector:
    """Show a pool in a registry, beside those that are mounted there already.

    Parameters
    ----------
    registry : CollectorRegistry
        The engine's.
    reporter : StatusReporter
        Of the pool.

    Returns
    -------
    ArenaCollector
        The registry's only one; its `remove` takes the pool out.
    """
    collector = _mounted.get(registry)
    if collector is None:
        collector = ArenaCollector()
        registry.register(collector)
        _mounted[registry] = collector
    collector.add(reporter)
    return collector


def make_registry(reporter: StatusReporter) -> CollectorRegistry:
    """Make a registry that holds the metrics of one pool, and nothing else."""
    registry = CollectorRegistry()
    mount(registry, reporter)
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
        The address to listen on; by default only this host can read them.

    Raises
    ------
    MetricsPortError
        The port is taken, above 65535, or reserved; or the address is not one of this host.
    """
    try:
        served = MetricsServer(HttpServer(host, port, make_registry(reporter)))
    except (OSError, OverflowError, UnicodeError) as error:  # the last of a text that cannot be a name
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "in use" if taken else f"not available ({getattr(error, 'strerror', None) or error})"
        raise MetricsPortError(
            f"port {port} of {host} is {why}, so no metrics can be served.",
            fix="Set KVARENA_METRICS_PORT to another port, or to 0 for a free one; KVARENA_METRICS_HOST "
            "must be an address of this host.",
        ) from error
    # An IPv6 address is in brackets, as in any URL.
    reporter.metrics_address = f"[{host}]:{served.port}" if ":" in host else f"{host}:{served.port}"
    return served


def _unique(reporter: StatusReporter, seen: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Values of `LABELS`; the second of two equal pools has a number behind its name."""
    labels = reporter.labels
    for number in itertools.count(1):
        name = reporter.name if number == 1 else f"{reporter.name}-{number}"
        values = (labels.role, labels.model, labels.rank, name)
        if values not in seen:
            seen.add(values)
            return values
    raise AssertionError("unreachable")


class _Families:
    """One family for each metric, filled pool by pool."""

    def __init__(self) -> None:
        self.labels: tuple[str, ...] = ("",) * len(LABELS)
        self._families = {
            name: _FAMILIES[kind](name, text, labels=(*LABELS, *own))
            for name, (kind, text, own) in METRICS.items()
        }

    def all(self) -> list[Metric]:
        return list(self._families.values())

    def add_pool(self, pool: PoolStatus) -> None:
        self._set("pool_info", 1, pool.state, pool.device, pool.driver)
        for name, value in (
            ("reserved_bytes", pool.reserved_bytes),
            ("backed_bytes", pool.backed_bytes),
            ("active_bytes", pool.active_bytes),
            ("sink_bytes", pool.sink_bytes),
            ("handles", len(pool.handle_bytes)),
            ("capacity_tokens", pool.tokens),
            ("capacity_requests", pool.requests),
            ("torch_cached_bytes", pool.torch_cached_bytes),
        ):
            if value is not None:
                self._set(name, value)

    def add_sub_pools(self, sub_pools: Iterable[SubPoolStatus]) -> None:
        for each in sub_pools:
            self._set("page_bytes", each.page_bytes, each.name)
            self._set("total_pages", each.num_pages, each.name)
            if each.live_pages is not None and each.free_pages is not None:
                self._set("live_pages", each.live_pages, each.name)
                self._set("free_pages", each.free_pages, each.name)
                # Of what this one could hold as things are: 1 means that the next allocation fails.
                can_hold = each.live_pages + each.free_pages
                self._set("kv_usage_ratio", each.live_pages / can_hold if can_hold else 0.0, each.name)

    def add_engines(self, engines: Iterable[EngineStatus]) -> None:
        for each in engines:
            for name, value in (
                ("registered_bytes", each.registered_bytes),
                ("registered_regions", len(each.regions)),
                ("registration_epoch", each.epoch),
                ("transfers_in_flight", each.in_flight),
                ("transferred_bytes", each.transferred_bytes),
                ("received_bytes", each.received_bytes),
                ("transfer_failures", each.failures),
            ):
                self._set(name, value, each.name)
            # Before the first transfer a rate needs a 0 to start from.
            for peer, count in each.peers.items() or [("", 0)]:
                self._set("transfers", count, each.name, peer)
            self._observe("transfer_seconds", each.transfer_seconds, each.name)
            self._observe("transfer_size_bytes", each.transfer_sizes, each.name)

    def add_decisions(self, tally: Tally) -> None:
        for reason, count in sorted(tally.refusals.items()):
            self._set("refusals", count, reason)
        self._observe("finalize_seconds", tally.finalize_seconds)

    def _set(self, name: str, value: float, *own: str) -> None:
        family = self._families[f"kvarena_{name}"]
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        family.add_metric((*self.labels, *own), value)

    def _observe(self, name: str, seen: Histogram | None, *own: str) -> None:
        if seen is None:
            return
        family = self._families[f"kvarena_{name}"]
        assert isinstance(family, HistogramMetricFamily)
        counts = itertools.accumulate(seen.counts)
        buckets = [(str(bound), count) for bound, count in zip((*seen.bounds, "+Inf"), counts, strict=True)]
        family.add_metric((*self.labels, *own), buckets, sum_value=seen.total)
