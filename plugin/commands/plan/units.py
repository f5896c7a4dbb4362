"""Sizes as people write them: ``80GiB``, ``143771 MiB``, ``141GB``."""

from __future__ import annotations

import math
import re

from kvarena.plugin.commands.plan.errors import PlanError

__all__ = ["GIB", "KIB", "MIB", "format_bytes", "parse_bytes"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": 1 << 40,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
#: Beyond any machine; a longer number is a slip of the finger.
_MAX = 1 << 60


def parse_bytes(text: str, *, what: str = "size", zero: bool = False) -> int:
    """Bytes that a text names; a bare ``G`` is binary, as in the tools that engines come with.

    Parameters
    ----------
    text : str
        A number and a unit: ``B``, ``kB``, ``MB``, ``GB``, ``TB`` (powers of 1000) or ``KiB``,
        ``MiB``, ``GiB``, ``TiB``, ``K``, ``M``, ``G``, ``T`` (powers of 1024).
    what : str
        What it is the size of, for the message.
    zero : bool
        Whether nothing is an answer.

    Raises
    ------
    PlanError
        No such size, or one that is not positive.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise PlanError(f"{what} {text!r} is not a size.", fix="Write it like 80GiB, 143771MiB or 141GB.")
    number = float(match[1].replace("_", "")) * unit
    if not math.isfinite(number) or number > _MAX:
        raise PlanError(f"{what} {text!r} is larger than any machine.", fix="Check the unit.")
    nbytes = int(number)
    if nbytes <= 0 and not zero:
        raise PlanError(f"{what} {text!r} is not positive.", fix="Give a size above zero.")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """A size for a reader: two digits after the point, in the largest binary unit that fits."""
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes:,} B"
