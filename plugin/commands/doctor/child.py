"""Runs a part of the doctor in a process of its own, whose crash or hang is an answer as well."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any, Final, final

__all__ = ["Child", "ChildFailed", "emit", "take_stdout"]

_LAST_LINES: Final = 3


class ChildFailed(Exception):
    """A child crashed, hung, or said nothing; the text says which, in the child's last words."""


@final
class Child:
    """A module of this package, run as a process that answers with lines of JSON.

    Parameters
    ----------
    module : str
        Its name below ``kvarena.plugin.commands.doctor``; its ``main(arguments)`` calls `take_stdout` first.
    arguments : sequence of str
        Of ``main``.
    environ : dict, optional
        Added to the environment.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), *, environ: dict[str, str] | None = None
    ) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        package = __name__.rpartition(".")[0]
        program = f"import sys; from {package}.{module} import main; sys.exit(main(sys.argv[1:]))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(environ or {})},
        )

    @property
    def log(self) -> str:
        """What it and its libraries have printed so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def tell(self, line: str) -> None:
        """Write a line to its standard input; one that has died does not hear it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # `answer` says why
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        """Its next line.

        Raises
        ------
        ChildFailed
            It died first, it took longer than `timeout` seconds, or it reports an error.
        """
        assert self._process.stdout is not None
        overdue = threading.Event()

        def kill() -> None:
            overdue.set()
            self._process.kill()

        timer = threading.Timer(timeout, kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()
        if not line:
            self._process.wait()
            if overdue.is_set():
                raise ChildFailed(f"no answer within {timeout:g} s")
            raise ChildFailed(self._epitaph())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildFailed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End it; a second call does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # What was still to be written nobody reads any more.
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _epitaph(self) -> str:
        code = self._process.returncode
        how = f"ended with status {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        last = [line for line in self.log.splitlines() if line.strip()][-_LAST_LINES:]
        return f"its process {how}" + (f": {' / '.join(last)}" if last else "")


_answers: IO[str] | None = None


def take_stdout() -> None:
    """In a child: keep standard output for `emit`; what libraries print there goes to the log."""
    global _answers
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def emit(answer: dict[str, Any]) -> None:
    """In a child: write one line of JSON."""
    assert _answers is not None, "call take_stdout first"
    _answers.write(json.dumps(answer) + "\n")
    _answers.flush()
