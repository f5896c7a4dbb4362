"""What each release of SGLang looks like, and which of its functions kvarena replaces there."""

from __future__ import annotations

from kvarena.plugin.engines.sglang.families.choice import (
    FAMILIES,
    Choice,
    choose,
    is_experimental,
    support_of,
)

__all__ = ["FAMILIES", "Choice", "choose", "is_experimental", "support_of"]
