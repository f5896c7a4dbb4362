"""Test your own transfer engine: inherit `TransferEngineContract`, or stack a `FailingEngine`.

The pytest plugin that kvarena installs makes assertions in the contract readable.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
