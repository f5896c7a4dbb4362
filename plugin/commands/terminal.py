"""Standard output and error, whatever they are: closed, a full disk, a pipe that nobody reads, not UTF-8."""

from __future__ import annotations

import contextlib
import io
import os
import sys

__all__ = ["abandon_stdout", "prepare_streams", "printable"]


def printable(text: str) -> str:
    """Text from a file or another process on one line: control and direction characters become ``\\x1b``.

    Otherwise a forged status file could write lines of its own, or move the cursor over those of others.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode("ascii")
        for each in text
    )


def prepare_streams() -> None:
    """Make both writable with any text: what a locale's encoding lacks becomes ``?``, a closed one a void."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def abandon_stdout() -> None:
    """After standard output could not be written: what is left in its buffer must not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):  # under a test it has no descriptor
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, sys.stdout.fileno())
        os.close(void)
