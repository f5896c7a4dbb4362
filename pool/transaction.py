"""Undo in reverse order, where a failing undo never hides what went wrong first."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import final

__all__ = ["Transaction", "add_note"]


@final
class Transaction:
    """Steps that are taken back, last first, when the block is left by an exception.

    An undo that fails itself does not stop the others; it becomes a note on
    the exception that is on its way.
    """

    __slots__ = ("_undo",)

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[[], object], str]] = []

    def undo(self, step: Callable[[], object], what: str) -> None:
        """Remember how to take back what was just done; `what` names it in a note."""
        self._undo.append((step, what))

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for step, what in reversed(self._undo):
                try:
                    step()
                except Exception as second:  # noqa: BLE001 - the first error is the one to raise
                    add_note(error, f"while undoing, {what} failed too: {second}")
        self._undo.clear()


def add_note(error: BaseException, note: str) -> None:
    """Attach a note; before Python 3.11 it is kept, though tracebacks do not show it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
