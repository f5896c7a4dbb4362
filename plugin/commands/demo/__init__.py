"""``kvarena demo``: a prefill and a decode process serve a text, and a third one checks their tokens."""

from __future__ import annotations

from kvarena.plugin.commands.demo.command import add_parser, run

__all__ = ["add_parser", "run"]
