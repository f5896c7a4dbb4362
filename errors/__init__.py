"""The root of every error that kvarena raises.

This package imports nothing, so that :mod:`kvarena.pool` and
:mod:`kvarena.transfer`, which know nothing of each other, can share it.
"""

from __future__ import annotations

from typing import Any

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

    def __reduce__(self) -> tuple[Any, ...]:
        # Children have other parameters, and errors travel between processes.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[KvArenaError], args: tuple[Any, ...], state: dict[str, Any]) -> KvArenaError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error
