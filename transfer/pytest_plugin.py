"""The pytest plugin that kvarena installs: fixtures for testing a transfer engine.

It is loaded by every pytest run in the environment, so it imports nothing heavy at the top.
"""

from __future__ import annotations

__all__: list[str] = []
