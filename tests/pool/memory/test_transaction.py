from __future__ import annotations

import pytest
from kvarena.pool.transaction import Transaction


def test_nothing_is_undone_when_all_went_well() -> None:
    done: list[str] = []
    with Transaction() as transaction:
        transaction.undo(lambda: done.append("a"), "a")
    assert done == []


def test_steps_are_undone_last_first_and_the_error_stays() -> None:
    done: list[str] = []

    def fail() -> None:
        raise OSError("no way back")

    def work() -> None:
        with Transaction() as transaction:
            transaction.undo(lambda: done.append("a"), "a")
            transaction.undo(fail, "putting b back")
            transaction.undo(lambda: done.append("c"), "c")
            raise ValueError("first")

    with pytest.raises(ValueError, match="first") as caught:
        work()
    assert done == ["c", "a"]
    assert caught.value.__notes__ == ["while undoing, putting b back failed too: no way back"]


def test_an_interrupt_undoes_too() -> None:
    done: list[str] = []

    def work() -> None:
        with Transaction() as transaction:
            transaction.undo(lambda: done.append("a"), "a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["a"]
