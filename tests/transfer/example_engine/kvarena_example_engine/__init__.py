"""A transfer engine for kvarena that moves pages over plain sockets."""

from __future__ import annotations

from kvarena_example_engine.engine import SocketEngine

__all__ = ["SocketEngine"]
