"""The ``kvarena`` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from kvarena.errors import KvArenaError

__all__ = ["main"]

#: Each is a module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``.
COMMANDS = ("demo", "doctor", "plan", "status")

EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 well, 1 the command's own verdict, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="kvarena", description="A KV cache that is sized after its CUDA graphs are captured."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"kvarena.plugin.{name}") for name in COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(modules[args.command].run(args))
    except KvArenaError as error:
        sys.stderr.write(f"kvarena {args.command}: {error}\n")
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader of a pipe has gone (`kvarena plan ... | head`); nothing to tell anyone.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
