"""A worker process that fails: its engine is closed on every path, and the client hears what ran out."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from kvarena.errors.shortage import describe_shortage
from kvarena.hooks.errors import HookError
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.embedded import control, worker
from kvarena.plugin.engines.embedded.access import Access, local_endpoint
from kvarena.plugin.engines.embedded.config import EngineConfig
from kvarena.plugin.engines.embedded.decode import DecodeServer
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.link import Hub
from kvarena.plugin.engines.embedded.worker import EXIT_FAILED, WorkerConfig


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    tmp_path.chmod(0o700)
    return Settings(
        memory_limit=1 << 20, transfer=("same-host",), socket_dir=str(tmp_path), load_plugins=False
    )


@pytest.fixture
def run_decode(
    settings: Settings, small: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Exception], tuple[int, control.Stopped]]]:
    """Run a decode worker in this process, whose first step raises."""
    closed: list[Engine] = []
    close = Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: (closed.append(engine), close(engine)))
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)

    def run(error: Exception) -> tuple[int, control.Stopped]:
        def fail(server: DecodeServer) -> None:
            raise error

        monkeypatch.setattr(DecodeServer, "step", fail)
        with Hub(local_endpoint(settings)) as hub:
            config = WorkerConfig("decode", small, settings, hub.address, Access())
            monkeypatch.setattr(
                sys, "stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(config)), encoding="utf-8")
            )
            status = worker.main()
            said = [message for _ in range(5) for _, message in hub.receive(1.0)]
        assert len(closed) == 1
        return status, next(message for message in said if isinstance(message, control.Stopped))

    yield run
    assert [path for path in Path(settings.socket_dir or "").rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "RLIMIT_NOFILE"),
        (zmq.ZMQError(errno.EMFILE), "RLIMIT_NOFILE"),
        (MemoryError(), "no memory or address space"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "no memory or address space"),
        (RuntimeError("can't start new thread"), "RLIMIT_NPROC"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "file system is full"),
    ],
    ids=str,
)
def test_a_shortage_ends_a_worker_in_order_and_is_named(
    run_decode: Callable[[Exception], tuple[int, control.Stopped]], error: Exception, said: str
) -> None:
    status, stopped = run_decode(error)
    assert status == EXIT_FAILED
    assert said in stopped.error
    assert "fault of kvarena" not in stopped.error
    assert stopped.pool["problems"] == []


def test_an_unexpected_error_ends_a_worker_in_order_and_asks_for_a_report(
    run_decode: Callable[[Exception], tuple[int, control.Stopped]],
) -> None:
    status, stopped = run_decode(ZeroDivisionError("division by zero"))
    assert status == EXIT_FAILED
    assert "ZeroDivisionError" in stopped.error
    assert "please report it" in stopped.error


def test_a_shortage_in_a_built_in_hook_is_not_a_fault_of_kvarena() -> None:
    error = HookError(
        "kvarena-engines", "kvarena_pool_finalized", OSError(errno.EMFILE, "Too many open files")
    )
    assert "RLIMIT_NOFILE" in str(error)
    assert "please report" not in str(error)
    assert "please report" in str(HookError("kvarena-engines", "hook", ValueError("wrong")))


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.ENOENT, "x"), zmq.Again()])
def test_other_errors_are_no_shortage(error: Exception) -> None:
    assert describe_shortage(error) == ""
