"""What counts as a whole number."""

from __future__ import annotations

import operator
from typing import SupportsIndex

__all__ = ["as_count"]


def as_count(value: object) -> int | None:
    """A whole number as an int, be it numpy's; None for anything else, booleans and arrays among it."""
    if type(value) is int:  # asked for on the way of every growth, where the protocol's check takes 10 µs
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):  # arrays have the method, and only those of one integer an answer
        return None
