"""Sizes in bytes as people write and read them: one parser and one formatter for the whole project."""

from __future__ import annotations

import math
import re

from kvarena.errors import KvArenaError

__all__ = ["GIB", "KIB", "MIB", "InvalidSizeError", "format_bytes", "parse_bytes"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

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
    "t": TIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
#: Beyond any machine, and below what overflows 64 bits; a larger number is a typing error.
MAX_BYTES = 1 << 60


class InvalidSizeError(KvArenaError):
    """A text or number that is not a size in bytes, or not one that can be used here."""


def parse_bytes(value: object, *, what: str = "size", zero: bool = True) -> int:
    """Bytes from a whole number, or from a text such as ``"80GiB"``, ``"143771 MiB"`` or ``"141GB"``.

    Parameters
    ----------
    value : object
        A number of bytes, or a text of a number and a unit: ``B``, ``kB``, ``MB``, ``GB``, ``TB``
        (powers of 1000) or ``KiB``, ``MiB``, ``GiB``, ``TiB`` (powers of 1024). A bare ``K``, ``M``,
        ``G`` or ``T`` is a power of 1024, as in the tools that engines come with. Case does not matter.
    what : str
        What it is the size of, for the message.
    zero : bool
        Whether 0 is accepted.

    Returns
    -------
    int
        Bytes; a fraction of a byte is dropped.

    Raises
    ------
    InvalidSizeError
        Not a size, 0 where that is not accepted, or more than `MAX_BYTES`.
    """
    text = value
    if isinstance(value, int) and not isinstance(value, bool):
        # Python does not print integers of more than 4300 digits; a string of as many is not read either.
        text = str(value) if value.bit_length() <= 64 else "9" * 30
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidSizeError(
            f"{what}: {_shown(value)} is not a valid size.",
            fix="Give bytes, or a number with KiB, MiB, GiB or TiB (powers of 1024), or kB, MB, GB or TB "
            "(powers of 1000).",
        )
    digits = match[1].replace("_", "")
    number = float(digits) * factor if "." in digits or len(digits) > 20 else int(digits) * factor
    if not math.isfinite(number) or number > MAX_BYTES:
        raise InvalidSizeError(
            f"{what}: {_shown(value)} is more than {MAX_BYTES} bytes.", fix="Check the unit, or give less."
        )
    nbytes = int(number)
    if nbytes == 0 and not zero:
        raise InvalidSizeError(f"{what}: {_shown(value)} is not positive.", fix="Give a size above zero.")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """A size for a reader, in the largest binary unit that fits: ``"135.58 GiB"``, ``"512 B"``."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} B"


def _shown(value: object) -> str:
    """A value in a message: short, whatever was given."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of many digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
