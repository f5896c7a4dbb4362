"""What running processes hold: the status files, and the command that shows them."""

from __future__ import annotations

from kvarena.plugin.commands.status.command import add_parser, run

__all__ = ["add_parser", "run"]
