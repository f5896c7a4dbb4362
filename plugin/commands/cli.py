"""The ``kvarena`` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from kvarena.errors import KvArenaError
from kvarena.plugin.commands.terminal import abandon_stdout, prepare_streams
from kvarena.plugin.version import kvarena_version

__all__ = ["main"]

#: Each is a module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``.
COMMANDS = ("demo", "doctor", "plan", "status")

EXIT_BAD_INPUT = 2
#: As of a command that SIGPIPE ends: its verdict has not been heard.
EXIT_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 well, 1 the command's own verdict, 2 bad input."""
    prepare_streams()
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvarena", description="A KV cache that is sized after its CUDA graphs are captured."
    )
    parser.add_argument("--version", action="version", version=f"kvarena {kvarena_version()}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"kvarena.plugin.commands.{name}") for name in COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status = int(modules[args.command].run(args))
        sys.stdout.flush()
        return status
    except KvArenaError as error:
        sys.stderr.write(f"kvarena {args.command}: {error}\n")
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader of a pipe has gone (`kvarena plan ... | head`); nothing to tell anyone.
        abandon_stdout()
        return EXIT_PIPE
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):
            # rich's answer to the same, with 1; that is a verdict of ours.
            return EXIT_PIPE
        raise
    except OSError as error:
        # A full disk, no folder for temporary files, no more processes: the system's words say it best.
        abandon_stdout()
        sys.stderr.write(f"kvarena {args.command}: {error}\n")
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
