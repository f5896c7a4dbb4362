"""``kvarena doctor``: is this machine, and this configuration, ready?"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.commands import options
from kvarena.plugin.commands.doctor.findings import Finding, Report

if TYPE_CHECKING:
    from kvarena.plugin.config import Settings

__all__ = ["add_parser", "examine", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the command to the ``kvarena`` parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="is this machine, and a configuration, ready?",
        description="Tries what kvarena needs of this machine, measures the transfer engines with a short "
        "transfer, and says every reason against a configuration. "
        "Exit status: 0 ready, 1 refused, 2 broken.",
    )
    parser.add_argument(
        "--device",
        type=options.device,
        metavar="DEVICE",
        help="cpu, cuda or cuda:1 (default: a GPU if there is one)",
    )
    parser.add_argument("--engine", choices=("embedded",), help="judge this engine's configuration")
    parser.add_argument(
        "--sglang-args",
        type=_arguments,
        metavar="ARGS",
        help="judge a server that is launched with these, as one text",
    )
    parser.add_argument("--quick", action="store_true", help="do not try the transfer engines")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Look at everything, and print it; the exit status is the verdict."""
    with _progress(quiet=args.json) as progress:
        report = Report.of(examine(args, progress))
    if args.json:
        document = {"verdict": report.verdict, "findings": msgspec.to_builtins(report.findings)}
        # In ASCII: a path need not be UTF-8, nor the terminal.
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        from kvarena.plugin.commands.doctor.view import show

        show(report)
    return report.exit_status


def examine(
    args: argparse.Namespace, progress: Callable[[str], None] = lambda what: None
) -> Iterator[Finding]:
    """Every finding, in the order in which they are shown.

    Parameters
    ----------
    args : Namespace
        Of the command.
    progress : callable, optional
        Takes a line before each part that takes long.
    """
    from kvarena.plugin.commands.doctor import configuration, device, sglang, start, transfers
    from kvarena.plugin.observe.status.files import directory_of

    yield start.examine_version()
    settings, found_settings = configuration.examine_settings()
    yield from found_settings
    yield from start.examine_start(settings)
    where = args.device or device.choose_device()
    progress(f"trying {where}")
    found = device.probe_device(where)
    yield from [found] if isinstance(found, Finding) else device.examine_device(found)
    yield from start.examine_gpu_processes(where)
    yield from _running(settings)
    if not isinstance(found, Finding):
        for name in transfers.names(settings.transfer):
            progress(f"moving memory with {name}")
            yield from transfers.examine_engine(
                name,
                where,
                wanted=name in settings.transfer or (name == "same-host" and settings.same_host),
                quick=args.quick,
                directory=directory_of(settings),
            )
    progress("looking at SGLang")
    yield from sglang.examine_sglang(settings, args.sglang_args)
    if args.engine == "embedded" and not isinstance(found, Finding):
        yield from configuration.examine_embedded(settings, found)


def _arguments(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command line: {str(error).lower()}") from error
    return text


def _running(settings: Settings) -> Iterator[Finding]:
    from kvarena.plugin.commands.doctor.device import processes
    from kvarena.plugin.observe.status.files import directory_of, find

    try:
        yield from processes(find(directory_of(settings)))
    except KvArenaError:
        return  # the settings' part has said so


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line that says what is being tried, on a terminal only, and gone at the end."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("looking") as status:
        yield lambda what: status.update(what)
