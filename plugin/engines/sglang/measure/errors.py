"""Why a measurement does not count."""

from __future__ import annotations

from kvarena.errors import KvArenaError

__all__ = ["MeasureError", "ProfileError"]


class MeasureError(KvArenaError):
    """A step could not be measured, here or on another rank; the pool gets the unmodified size."""


class ProfileError(KvArenaError):
    """A kept measurement cannot be used or written; the steps are measured anew."""
