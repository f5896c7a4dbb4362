"""Lets a benchmark run from a checkout where kvarena is not installed, and without msgspec."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("kvarena") is None:
    sys.path.insert(0, str(ROOT / ".types"))
if importlib.util.find_spec("msgspec") is None and "kvarena.transfer" not in sys.modules:
    # The same-host engine itself needs no msgspec; the package's front door does.
    _package = types.ModuleType("kvarena.transfer")
    _package.__path__ = [str(ROOT / "transfer")]
    sys.modules["kvarena.transfer"] = _package
