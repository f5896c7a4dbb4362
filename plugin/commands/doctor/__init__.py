"""Looks at a machine and a configuration, and says what kvarena can do there."""

from __future__ import annotations

from kvarena.plugin.commands.doctor.command import add_parser, run

__all__ = ["add_parser", "run"]
