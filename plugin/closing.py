"""Closing in steps: each is taken, whatever became of the ones before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarena.errors import KvArenaError
from kvarena.pool.transaction import add_note

__all__ = ["failures_of", "raise_first"]


def failures_of(step: Callable[[], object], who: str) -> list[KvArenaError]:
    """What closing `who` raised; engines and drivers may be anybody's, and raise anything."""
    try:
        step()
    except KvArenaError as error:
        return [error]
    except Exception as error:  # noqa: BLE001 - the caller raises it when every step has been taken
        failure = KvArenaError(f"{who} could not be closed: {type(error).__name__}: {error}.")
        failure.__cause__ = error
        return [failure]
    return []


def raise_first(failures: Sequence[KvArenaError]) -> None:
    """Raise the first failure, if there is one, with the others as notes."""
    for second in failures[1:]:
        add_note(failures[0], f"this failed too: {second}")
    if failures:
        raise failures[0]
