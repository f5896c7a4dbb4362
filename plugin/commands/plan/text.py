"""Text from a file that was downloaded, made fit for a terminal."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, maximum: int) -> str:
    """A text whose control characters are spelt out, cut to `most` characters.

    A terminal obeys escape sequences, wherever they come from.
    """
    # Cut first: a hostile text may be megabytes long.
    cut = text if len(text) <= maximum else text[: maximum - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
