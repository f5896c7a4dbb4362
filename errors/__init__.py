"""The root of every error that kvarena raises.

This package imports nothing, so that :mod:`kvarena.pool` and
:mod:`kvarena.transfer`, which know nothing of each other, can share it.
"""

from __future__ import annotations

__all__ = ["KvArenaError"]


class KvArenaError(Exception):
    """Something that kvarena refuses or that failed beneath it.

    Parameters
    ----------
    what : str
        What happened, with the numbers.
    fix : str, optional
        What to set or do about it.
    """

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(f"{what} {fix}".strip())
        self.what = what
        self.fix = fix
