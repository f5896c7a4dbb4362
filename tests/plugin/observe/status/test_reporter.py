"""The status file says what the pool, its allocators and its ledgers say."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvarena.plugin.observe.status.collect import sample
from kvarena.plugin.observe.status.files import Found, find
from kvarena.plugin.observe.status.model import PoolStatus
from kvarena.plugin.observe.status.usage import PageUsage

MIB = 1 << 20


def _wait(directory: Path, holds: Callable[[PoolStatus], bool]) -> PoolStatus:
    """The file is written by another thread: soon, not at once."""
    deadline = time.monotonic() + 20
    last = None
    while time.monotonic() < deadline:
        for found in find(directory):
            assert found.status is not None, found
            last = found.status.pool
            if holds(last):
                return last
        time.sleep(0.02)
    pytest.fail(f"the status file never said so: {last}")


def _only(directory: Path) -> Found:
    (found,) = find(directory)
    return found


def test_the_file_is_the_owners_alone_and_goes_with_the_pool(serve: Any, directory: Path) -> None:
    served = serve()
    _wait(directory, lambda pool: pool.state == "reserved")
    found = _only(directory)
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (found.state, found.status.name) == ("running", "decode")
    served.lifecycle.close()
    assert list(directory.iterdir()) == []


def test_it_follows_the_pool_through_its_life(serve: Any, directory: Path) -> None:
    served = serve(transfer=("mooncake",))
    pool, allocator, lifecycle = served.pool, served.allocator, served.lifecycle

    def settled() -> PoolStatus:
        # A file that is written while something changes holds parts of before and of after.
        return _wait(directory, lambda pool: pool == lifecycle.reporter.pool_status())

    said = settled()
    assert (said.backed_bytes, said.reserved_bytes) == (pool.arena.backed_bytes, 8 * MIB)
    assert said.engines[0].regions == ((0, pool.sink_bytes),)

    served.finalize(4 * MIB)
    ids = allocator.alloc(10 * 16)
    allocator.free_swa(ids[: 4 * 16])
    said = settled()
    full, swa = said.sub_pools
    assert (full.live_pages, swa.live_pages) == (10, 6)
    assert said.state == "serving"
    assert said.backed_bytes == said.registered_bytes == pool.arena.backed_bytes == 4 * MIB
    assert full.free_pages == allocator.full_available_size() // 16
    assert swa.free_pages == allocator.swa_attn_allocator.available_size() // 16
    assert said.tokens == allocator.size_full == full.num_pages * 16

    epoch = said.engines[0].epoch
    lifecycle.grow(6 * MIB, allocator)
    said = settled()
    assert said.engines[0].epoch > epoch
    assert said.handle_bytes == (4 * MIB, 2 * MIB)
    assert said.tokens == allocator.size_full

    epoch = said.engines[0].epoch
    lifecycle.shrink(4 * MIB, allocator)
    said = settled()
    assert len(said.handle_bytes) == 1
    assert (said.backed_bytes, said.tokens) == (4 * MIB, allocator.size_full)
    assert said.engines[0].epoch > epoch


def test_an_eager_pool_says_so(serve: Any, directory: Path) -> None:
    served = serve(post_capture=False)
    served.lifecycle.reporter.watch(served.allocator)
    said = _wait(directory, lambda pool: pool.state == "eager")
    assert said.tokens == served.allocator.size_full
    assert said.handle_bytes == (8 * MIB,)


def test_two_pools_of_one_process_have_two_files(serve: Any, directory: Path) -> None:
    serve("one")
    serve("two")
    deadline = time.monotonic() + 20
    names: set[str] = set()
    while names != {"one", "two"} and time.monotonic() < deadline:
        names = {found.status.name for found in find(directory) if found.status is not None}
    assert names == {"one", "two"}


def test_switched_off_it_writes_nothing(serve: Any, directory: Path) -> None:
    served = serve(status=False)
    served.finalize(4 * MIB)
    assert not directory.exists()
    # The history is there for a picture all the same.
    assert served.lifecycle.reporter.history().samples


def test_a_directory_of_others_is_reported_and_the_engine_serves(
    serve: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir(mode=0o755)
    served = serve()
    served.finalize(4 * MIB)
    assert "no status is kept" in caplog.text
    assert f"chmod 0700 {directory}" in caplog.text
    assert served.allocator.alloc(16) is not None


def test_a_disk_that_fails_for_a_while_is_reported_once_and_leaves_no_stale_file(
    serve: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    _wait(directory, lambda pool: pool.state == "reserved")
    away = directory.rename(directory.with_name("away"))
    directory.write_text("a file where the directory was")
    deadline = time.monotonic() + 20
    while "trying again" not in caplog.text and time.monotonic() < deadline:
        served.lifecycle.reporter.record()
        time.sleep(0.02)
    for _ in range(3):
        served.lifecycle.reporter._write()
    directory.unlink()
    away.rename(directory)
    served.finalize(4 * MIB)
    _wait(directory, lambda pool: pool.state == "serving")
    served.lifecycle.close()
    assert list(directory.iterdir()) == []
    assert caplog.text.count("cannot be written, trying again") == 1


def test_a_source_that_fails_is_reported_once_and_harms_nobody(
    serve: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def page_usage(self) -> Mapping[str, PageUsage]:
            raise RuntimeError("dictionary changed size during iteration")

    served = serve()
    served.finalize(4 * MIB)
    served.lifecycle.reporter.watch(Broken())
    for _ in range(3):
        served.lifecycle.reporter.record()
    assert served.lifecycle.reporter.pool_status().sub_pools[0].live_pages is None
    assert caplog.text.count("live and free pages cannot be read") == 1
    served.lifecycle.reporter.watch(Broken())  # another one, which has said nothing yet
    served.lifecycle.reporter.record()
    assert caplog.text.count("live and free pages cannot be read") == 2


def test_the_history_stays_small_and_keeps_the_events(serve: Any) -> None:
    served = serve(status=False)
    served.finalize(4 * MIB)
    recorder = served.lifecycle.reporter._recorder
    timeline = served.lifecycle.timeline
    began = timeline._began
    for _ in range(3000):
        timeline._began -= recorder.interval_s  # so much time goes by
        recorder.record(served.pool, (), {})
    timeline._began = began
    for _ in range(500):
        recorder.record(served.pool, (), {}, mark=True)
    history = served.lifecycle.reporter.history()
    assert len(history.samples) <= 801
    assert history.samples == sorted(history.samples, key=lambda each: each.at_s)
    assert history.samples[0].backed_bytes == served.pool.driver.granularity * -(
        -served.pool.sink_bytes // served.pool.driver.granularity
    )
    assert [event.name for event in history.events][:2] == ["reserved", "sink"]
    assert recorder.interval_s > 0.05


def test_a_directory_that_was_removed_is_made_again(serve: Any, directory: Path) -> None:
    serve()
    _wait(directory, lambda pool: pool.state == "reserved")
    shutil.rmtree(directory)
    deadline = time.monotonic() + 20
    while not directory.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    _wait(directory, lambda pool: pool.state == "reserved")


def test_an_idle_process_is_written_every_second_however_old_it_is(serve: Any, directory: Path) -> None:
    served = serve()
    served.finalize(4 * MIB)
    reporter = served.lifecycle.reporter
    reporter._recorder.interval_s = 1e300  # as after ages
    reporter.record()
    time.sleep(0.5)
    written = {_only(directory).status.written_at}
    deadline = time.monotonic() + 20
    while len(written) < 4 and time.monotonic() < deadline:
        written.add(_only(directory).status.written_at)
        time.sleep(0.05)
    assert len(written) == 4
    assert reporter._thread.is_alive()


def test_thousands_of_growth_cycles_leave_the_thread_alive_and_the_history_small(serve: Any) -> None:
    served = serve()
    served.finalize(4 * MIB)
    reporter = served.lifecycle.reporter
    for _ in range(7000):
        served.lifecycle.timeline.add("grown", nbytes=4 * MIB)
    assert reporter._thread.is_alive()
    assert len(served.lifecycle.timeline.events) == 1000
    assert [event.name for event in served.lifecycle.timeline.events][:2] == ["reserved", "sink"]
    history = reporter.history()
    assert len(history.samples) <= 801
    assert len(history.events) <= 200


def test_a_sample_of_thousands_of_handles_is_small_and_counts_them() -> None:
    mappings = [SimpleNamespace(nbytes=2)] * 5000
    arena = SimpleNamespace(mappings=mappings, backed_bytes=10_000)
    pool: Any = SimpleNamespace(arena=arena, sub_pool_specs=(), active_allocation_bytes=10_000)
    taken = sample(0.0, pool, (), {})
    assert (taken.handles, len(taken.handle_bytes), sum(taken.handle_bytes)) == (5000, 64, 10_000)


def test_what_an_observer_raises_never_reaches_the_engine(serve: Any) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("the observer is broken")

    served = serve()
    served.lifecycle.timeline.listeners.insert(0, broken)
    served.lifecycle.reporter._ledgers = lambda: 1 / 0
    served.finalize(4 * MIB)
    assert served.allocator.alloc(16) is not None
    assert served.lifecycle.reporter._thread.is_alive()
    served.lifecycle.reporter._ledgers = tuple


def test_the_reporter_stops_with_a_pool_that_never_came(serve: Any, directory: Path) -> None:
    from kvarena.plugin.config import Settings
    from kvarena.plugin.lifecycle import PoolLifecycle

    lifecycle = PoolLifecycle(Settings(socket_dir=str(directory), load_plugins=False), device="cpu")
    lifecycle.close()
    lifecycle.close()
    assert not directory.exists()
