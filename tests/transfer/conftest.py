"""Makes the support modules importable, here and in spawned processes, which inherit the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "support"))
