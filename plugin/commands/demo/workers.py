"""The demo's worker processes: started, watched, and ended whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final

import msgspec
from kvarena.plugin.engines.embedded.worker import Role, WorkerConfig

__all__ = ["GRACE_S", "INTERRUPTED_GRACE_S", "Workers"]

GRACE_S: Final = 20.0
#: What is left of that when the run is broken off, as by Ctrl-C.
INTERRUPTED_GRACE_S: Final = 1.5


class Workers:
    """Processes of the embedded engine, one for each role.

    Parameters
    ----------
    verbose : bool
        Whether they write to this process's standard error instead of to logs of their own.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self.processes: dict[Role, subprocess.Popen[bytes]] = {}
        self._logs: dict[Role, IO[bytes]] = {}

    def start(self, config: WorkerConfig, *, prefix: Sequence[str] = ()) -> None:
        """Start a worker, and tell it its configuration.

        Parameters
        ----------
        config : WorkerConfig
        prefix : sequence of str
            A command that becomes the worker, such as one that enters a network namespace.
        """
        # What libraries print is shown only if the worker dies of something.
        log = self._logs[config.role] = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "kvarena.plugin.engines.embedded.worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=None if self._verbose else log,
            # One thread each: the workers share the cores, and a fixed number keeps the rounding the same.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.processes[config.role] = process
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(config))

    def ended(self) -> set[Role]:
        """Whose process has ended."""
        return {role for role, process in self.processes.items() if process.poll() is not None}

    def describe_end(self, role: Role) -> str:
        """What is known of a process that ended without a message."""
        code = self.processes[role].returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        log = self._logs[role]
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"it {how}" + (f"; its last line was: {last[0]}" if last and code >= 0 else ".")

    def end_all(self, expected: set[Role], grace_s: float = GRACE_S) -> None:
        """End every process, and leave none.

        Parameters
        ----------
        expected : set of str
            The roles that end by themselves; the others are terminated.
        grace_s : float
            Seconds after which those that are left are killed.
        """
        end = time.monotonic() + grace_s
        for role, process in self.processes.items():
            if process.poll() is None and role not in expected:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs.values():
            log.close()
