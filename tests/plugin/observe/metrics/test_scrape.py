"""A scrape over HTTP finds what the pool says of itself."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvarena.plugin.config import Settings
from kvarena.plugin.lifecycle import PoolLifecycle
from kvarena.plugin.observe.metrics import (
    LABELS,
    ArenaCollector,
    MetricsPortError,
    make_registry,
    mount,
    serve_metrics,
)
from kvarena.plugin.observe.server import MAX_CONNECTIONS
from kvarena.plugin.observe.status.collect import _engine
from kvarena.plugin.observe.status.model import PoolLabels, PoolStatus
from kvarena.plugin.observe.status.reporter import StatusReporter
from kvarena.plugin.observe.timeline import Timeline
from kvarena.pool import MHASubPoolSpec, SizingRequest, UnifiedSWATokenToKVPoolAllocator, resize_for
from kvarena.transfer.pages.lease import LeaseTable
from kvarena.transfer.registration.traffic import Traffic
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

MIB = 1 << 20
SPECS = (
    MHASubPoolSpec("full", "up", 2, 2, 32, torch.float16),
    MHASubPoolSpec("swa", "down", 2, 4, 32, torch.float16),
)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def lifecycle(tmp_path: Path) -> Iterator[PoolLifecycle]:
    settings = Settings(
        metrics_port=0, status=False, load_plugins=False, memory_limit=64 * MIB, transfer=("mooncake",)
    )
    made = PoolLifecycle(settings, device="cpu", name="decode")
    yield made
    made.close()


def _port(lifecycle: PoolLifecycle) -> int:
    address = lifecycle.reporter.metrics_address
    assert address is not None
    host, _, port = address.partition(":")
    assert host == "127.0.0.1"
    return int(port)


def _own(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in labels.items() if name not in LABELS))


def _scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, _own(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_follows_the_pool(lifecycle: PoolLifecycle) -> None:
    port = _port(lifecycle)
    engine = (("engine", "mooncake"),)
    full, swa = (("sub_pool", "full"),), (("sub_pool", "swa"),)

    assert _scrape(port)["kvarena_reserved_bytes", ()] == 0
    lifecycle.plan(SizingRequest(enabled=False, driver="host", device="cpu", ray=True))
    pool = lifecycle.reserve(SPECS, total_bytes=8 * MIB, page_size=16)
    seen = _scrape(port)
    assert seen["kvarena_refusals_total", (("reason", "disabled"),)] == 1
    assert seen["kvarena_refusals_total", (("reason", "ray"),)] == 1
    assert seen["kvarena_reserved_bytes", ()] == 8 * MIB
    assert seen["kvarena_backed_bytes", ()] == pool.arena.backed_bytes
    assert seen["kvarena_registered_bytes", engine] == pool.arena.backed_bytes
    assert seen["kvarena_finalize_seconds_count", ()] == 0
    assert ("kvarena_live_pages", full) not in seen

    allocator = UnifiedSWATokenToKVPoolAllocator(pool)
    lifecycle.finalize(resize_for(pool, 4 * MIB), allocator)
    ids = allocator.alloc(5 * 16)
    assert ids is not None
    allocator.free_swa(ids[: 2 * 16])
    seen = _scrape(port)
    assert seen["kvarena_backed_bytes", ()] == 4 * MIB
    assert seen["kvarena_registered_bytes", engine] == 4 * MIB
    assert seen["kvarena_handles", ()] == 1
    assert seen["kvarena_finalize_seconds_count", ()] == 1
    assert seen["kvarena_finalize_seconds_sum", ()] > 0
    assert seen["kvarena_finalize_seconds_bucket", (("le", "+Inf"),)] == 1
    assert (seen["kvarena_live_pages", full], seen["kvarena_live_pages", swa]) == (5, 3)
    assert seen["kvarena_total_pages", full] * 16 == allocator.size_full
    can_hold = 5 + seen["kvarena_free_pages", full]
    assert seen["kvarena_kv_usage_ratio", full] == 5 / can_hold
    assert seen["kvarena_free_pages", full] * 16 == allocator.full_available_size()
    assert seen["kvarena_capacity_tokens", ()] == allocator.size_full
    assert ("kvarena_capacity_requests", ()) not in seen
    epoch = seen["kvarena_registration_epoch", engine]

    lifecycle.grow(6 * MIB, allocator)
    seen = _scrape(port)
    assert seen["kvarena_handles", ()] == 2
    assert seen["kvarena_registration_epoch", engine] > epoch
    with lifecycle.ledgers[0].gate.transfer():
        assert _scrape(port)["kvarena_transfers_in_flight", engine] == 1
    assert _scrape(port)["kvarena_transfers_in_flight", engine] == 0


def test_the_port_is_free_again_after_close(lifecycle: PoolLifecycle) -> None:
    port = _port(lifecycle)
    lifecycle.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_in_use_is_named(lifecycle: PoolLifecycle) -> None:
    port = _port(lifecycle)
    with pytest.raises(
        MetricsPortError, match=rf"port {port} of 127\.0\.0\.1 is in use.*KVARENA_METRICS_PORT"
    ):
        PoolLifecycle(Settings(metrics_port=port, load_plugins=False), device="cpu")


@pytest.mark.parametrize(
    ("port", "host"),
    # A name of two dots in a row, or with a label of more than 63 bytes, fails before it is looked up.
    [(0, "192.0.2.1"), (0, "no.such.host.invalid"), (65536, "127.0.0.1"), (0, "é..b"), (0, "x" * 64)],
)
def test_an_address_that_is_not_ours_is_named(port: int, host: str) -> None:
    reporter = StatusReporter(Settings(), Timeline())
    with pytest.raises(
        MetricsPortError, match=rf"port {port} of {host} is not available .*KVARENA_METRICS_HOST"
    ):
        serve_metrics(reporter, port, host)
    assert reporter.metrics_address is None


def test_another_address_is_served_when_it_is_asked_for() -> None:
    settings = Settings(metrics_port=0, metrics_host="127.0.0.2", status=False, load_plugins=False)
    made = PoolLifecycle(settings, device="cpu")
    try:
        address = made.reporter.metrics_address
        assert address is not None
        assert address.startswith("127.0.0.2:")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert b"kvarena_pool_info" in answer.read()
    finally:
        made.close()


def test_an_ipv6_address_is_one_that_a_browser_takes() -> None:
    reporter = StatusReporter(Settings(), Timeline())
    try:
        server = serve_metrics(reporter, 0, "::1")
    except MetricsPortError:
        pytest.skip("no IPv6 here")
    try:
        with urllib.request.urlopen(f"http://{reporter.metrics_address}/metrics", timeout=10) as answer:
            assert b"kvarena_pool_info" in answer.read()
    finally:
        server.close()


def test_only_the_loopback_address_listens(lifecycle: PoolLifecycle) -> None:
    # 127.0.0.2 is this host as well, and would answer if all addresses were bound.
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", _port(lifecycle))) != 0


def test_an_engine_mounts_the_collector_in_its_own_registry(lifecycle: PoolLifecycle) -> None:
    registry = CollectorRegistry()
    registry.register(ArenaCollector(lifecycle.reporter))
    pool = lifecycle.reserve(SPECS, total_bytes=8 * MIB, page_size=16)
    labels = {"role": "", "model": "", "rank": "", "pool": "decode"}
    assert registry.get_sample_value("kvarena_reserved_bytes", labels) == pool.arena.reserved_bytes
    labels |= {"state": "reserved", "device": "cpu", "driver": "host"}
    assert registry.get_sample_value("kvarena_pool_info", labels) == 1
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(ArenaCollector(lifecycle.reporter))


def test_two_pools_in_one_registry_are_one_family_and_a_series_each(lifecycle: PoolLifecycle) -> None:
    other = StatusReporter(Settings(), Timeline(), name="decode")
    registry = CollectorRegistry()
    lifecycle.reporter.labels = PoolLabels(role="decode", model="m", rank="0")
    mount(registry, lifecycle.reporter)
    collector = mount(registry, other)
    pool = lifecycle.reserve(SPECS, total_bytes=8 * MIB, page_size=16)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE kvarena_reserved_bytes ") == 1
    first = {"role": "decode", "model": "m", "rank": "0", "pool": "decode"}
    second = {"role": "", "model": "", "rank": "", "pool": "decode"}
    assert text.count("\nkvarena_reserved_bytes{") == 2
    assert registry.get_sample_value("kvarena_reserved_bytes", first) == pool.arena.reserved_bytes
    assert registry.get_sample_value("kvarena_reserved_bytes", second) == 0
    lifecycle.reporter.labels = other.labels  # equal in everything: still one series each
    numbered = second | {"pool": "decode-2"}
    assert registry.get_sample_value("kvarena_reserved_bytes", second) == pool.arena.reserved_bytes
    assert registry.get_sample_value("kvarena_reserved_bytes", numbered) == 0
    collector.remove(other)
    assert registry.get_sample_value("kvarena_reserved_bytes", numbered) is None


def test_traffic_is_counted_by_peer_size_and_time() -> None:
    traffic = Traffic()
    for number in range(100):
        traffic.submitted(f"peer-{number}")
    traffic.ended(1 << 20, 0.002)
    traffic.ended(1 << 40)
    traffic.received(4096)
    assert sum(traffic.peers.values()) == traffic.transfers == 100
    assert (len(traffic.peers), traffic.peers["other"]) == (65, 36)
    ledger = SimpleNamespace(
        engine=SimpleNamespace(name="nixl"),
        registered_bytes=0,
        regions=(),
        epoch=0,
        gate=SimpleNamespace(in_flight=0),
        traffic=traffic,
    )
    engine = _engine(ledger, 0)  # type: ignore[arg-type]
    reporter = StatusReporter(Settings(), Timeline())
    status = PoolStatus(state="serving", engines=(engine,))
    reporter.pool_status = lambda: status  # type: ignore[method-assign]
    text = generate_latest(make_registry(reporter)).decode()
    seen = {
        (sample.name, _own(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    nixl = ("engine", "nixl")
    assert seen["kvarena_received_bytes_total", (nixl,)] == 4096
    assert seen["kvarena_transfers_total", (nixl, ("peer", "other"))] == 36
    assert seen["kvarena_transfer_seconds_bucket", (nixl, ("le", "0.001"))] == 0
    assert seen["kvarena_transfer_seconds_bucket", (nixl, ("le", "0.0025"))] == 1
    assert seen["kvarena_transfer_seconds_count", (nixl,)] == 1
    assert seen["kvarena_transfer_size_bytes_count", (nixl,)] == 2
    assert seen["kvarena_transfer_size_bytes_sum", (nixl,)] == (1 << 20) + (1 << 40)


def test_a_thousand_idle_connections_are_a_few_threads_and_a_scrape_passes(lifecycle: PoolLifecycle) -> None:
    port = _port(lifecycle)
    before = threading.active_count()
    idle = []
    try:
        for _ in range(1000):
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        assert ("kvarena_reserved_bytes", ()) in _scrape(port)
        assert threading.active_count() - before <= MAX_CONNECTIONS
    finally:
        for each in idle:
            each.close()


def test_events_that_the_timeline_has_let_go_are_still_counted() -> None:
    reporter = StatusReporter(Settings(), Timeline())
    for _ in range(3000):
        reporter.timeline.add("refused", code="efa")
        reporter.timeline.add("finalized", milliseconds=2.0)
    labels = {"role": "", "model": "", "rank": "", "pool": reporter.name}
    registry = make_registry(reporter)
    assert registry.get_sample_value("kvarena_refusals_total", {**labels, "reason": "efa"}) == 3000
    assert registry.get_sample_value("kvarena_finalize_seconds_count", labels) == 3000


def test_without_a_port_prometheus_is_not_even_imported() -> None:
    program = (
        "import sys\n"
        "from kvarena.plugin.config import Settings\n"
        "from kvarena.plugin.lifecycle import PoolLifecycle\n"
        "PoolLifecycle(Settings(load_plugins=False), device='cpu').close()\n"
        "sys.exit('prometheus_client' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


def test_pages_that_a_peer_has_written_are_counted_when_their_lease_completes() -> None:
    received: list[str] = []
    table = LeaseTable(on_complete=lambda lease: received.append(lease.request))
    leases = [table.grant(request, {"full": [page]}, epoch=1) for page, request in enumerate("ab", start=1)]
    table.revoke("a", "cancelled")
    table.complete("b", leases[1].serial)
    assert received == ["b"]
