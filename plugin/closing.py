"""Closing in steps: each is taken, whatever became of the ones before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvarena.errors import KvArenaError
from kvarena.pool.transaction import add_note

if TYPE_CHECKING:
    from kvarena.hooks import HookManager
    from kvarena.pool import ResizablePool
    from kvarena.transfer import RegistrationLedger

__all__ = ["close_pool", "failures_of", "raise_first"]


def close_pool(
    manager: HookManager,
    pool: ResizablePool,
    ledgers: Callable[[], Sequence[RegistrationLedger]],
    last: Callable[[], object],
    *,
    let_go: Callable[[], list[KvArenaError]] = list,
) -> list[KvArenaError]:
    """Tell every plugin, then let go of the memory, unless an engine still holds a region of it.

    Parameters
    ----------
    manager : HookManager
        Whose plugins hear of it; the keeper of the ledgers is one.
    pool : ResizablePool
        What is closed.
    ledgers : callable
        Those that there are now.
    last : callable
        Lets go of the memory.
    let_go : callable, optional
        What comes between: when nothing is registered any more, and the memory is there still.

    Returns
    -------
    list of KvArenaError
        What failed. Memory under a registration that could not be taken back stays mapped: closing again
        tries again.
    """
    failures = manager.call_every("kvarena_pool_closing", pool=pool)
    held = [ledger for ledger in ledgers() if ledger.regions]
    if held:
        if not failures:
            failures.append(
                KvArenaError(
                    f"{', '.join(ledger.engine.name for ledger in held)} still holds registrations; "
                    "the memory stays.",
                    fix="Close again once the engine lets go.",
                )
            )
        return failures
    return [*failures, *let_go(), *failures_of(last, "the pool")]


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
