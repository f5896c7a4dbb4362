"""Registers arena memory with transfer engines, and moves pages between arenas.

The names are loaded on first use, so that an engine costs nothing where another is used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
