"""Makes the support modules importable, here and in spawned processes, which inherit the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "support"))

# A distribution of its own: test_example_engine installs it and runs its tests.
collect_ignore = ["example_engine"]
