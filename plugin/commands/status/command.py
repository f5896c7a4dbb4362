"""``kvarena status``: what this user's running processes hold."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.commands.terminal import printable
from kvarena.plugin.config import load_settings
from kvarena.plugin.observe.status.files import Found, directory_of, find

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the command to the ``kvarena`` parser."""
    parser = subparsers.add_parser(
        "status",
        help="what running processes hold",
        description="What this user's running kvarena processes hold, from their status files.",
    )
    parser.add_argument("--pid", type=int, help="only this process")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="show it again every so many seconds (1), until Ctrl-C",
    )
    parser.add_argument("--plot", type=_file, metavar="FILE", help="draw the arenas over time (.png, .svg)")


def run(args: argparse.Namespace) -> int:
    """Show the processes; 0 also when there is none, 1 when there is none of the number that was asked for.

    Raises
    ------
    KvArenaError
        The directory of the status files cannot be trusted, or the picture cannot be drawn.
    """
    directory = directory_of(load_settings())

    def look() -> list[Found]:
        found = find(directory)
        return [each for each in found if args.pid is None or _pid(each) == args.pid]

    found: list[Found] = []

    if args.plot is not None:
        _plot(look(), directory, args.plot, args.pid)
    elif args.watch is not None:
        _watch(look, directory, args.watch, args.pid, as_json=args.json)
    elif args.json:
        found = look()
        _write_json(found, directory)
    else:
        from kvarena.plugin.commands.status.view import show

        found = look()
        show(found, directory, pid=args.pid)
    asked_once = args.plot is None and args.watch is None
    return int(asked_once and args.pid is not None and not found)


def _plot(found: Sequence[Found], directory: Path, path: Path, pid: int | None) -> None:
    from kvarena.plugin.observe.picture import draw_arena

    histories = [each.status.history for each in found if each.state == "running" and each.status]
    drawn = [history for history in histories if history is not None and history.samples]
    if not drawn:
        raise KvArenaError(
            f"no running kvarena process{'' if pid is None else f' with the number {pid}'} has a status file "
            f"in {directory}, so there is nothing to draw.",
            fix="Start one, or name its directory in KVARENA_SOCKET_DIR.",
        )
    draw_arena(drawn, path)
    sys.stdout.write(f"{path}: {printable(', '.join(history.title for history in drawn))}\n")


def _watch(
    look: Callable[[], list[Found]], directory: Path, seconds: float, pid: int | None, *, as_json: bool
) -> None:
    try:
        if as_json:
            while True:
                _write_json(look(), directory)
                sys.stdout.flush()
                time.sleep(seconds)
        from kvarena.plugin.commands.status.view import watch

        watch(look, directory, seconds, pid=pid)
    except KeyboardInterrupt:
        return  # how one ends it


def _write_json(found: Sequence[Found], directory: Path) -> None:
    """One line: the processes without their histories, which only pictures need."""
    processes = []
    for each in found:
        status = {} if each.status is None else msgspec.to_builtins(each.status)
        status.pop("history", None)
        processes.append({"state": each.state, "path": str(each.path), "why": each.why, **status})
    # In ASCII: a path need not be UTF-8, nor the terminal.
    sys.stdout.write(json.dumps({"directory": str(directory), "processes": processes}) + "\n")


def _pid(found: Found) -> int | None:
    return None if found.status is None else found.status.identity.pid


def _file(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("the name of the picture is empty: give a file such as arena.png")
    return Path(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 3600")
    return seconds
