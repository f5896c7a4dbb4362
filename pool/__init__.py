"""Memory: drivers, the arena, layouts, pools, allocators, and sizing.

The names are loaded on first use, so that ``kvarena.pool.errors`` costs no
import of torch.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
