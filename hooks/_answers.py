"""What a plugin's answer must be, so that a wrong one is its plugin's failure and nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvarena.pool._counts import as_count

__all__ = ["checked_answer"]


def checked_answer(hook: str, answer: object) -> object:
    """A plugin's answer to a hook; lists are complete, where a plugin answered with a generator.

    Raises
    ------
    TypeError
        It is not what the hook asks for.
    """
    check = _CHECKS.get(hook)
    return answer if check is None or answer is None else check(answer)


def _driver(answer: object) -> object:
    from kvarena.pool.driver import Driver

    return _having(answer, Driver)


def _budget(answer: object) -> int:
    nbytes = as_count(answer)
    if nbytes is None:
        raise TypeError(f"it answered {answer!r}, which is not a whole number of bytes")
    return nbytes


def _refusals(answer: object) -> list[object]:
    from kvarena.pool.refusals import Refusal

    refusals = _listed(answer)
    for refusal in refusals:
        if not isinstance(refusal, Refusal):
            raise TypeError(f"it answered with {refusal!r}, which is not a Refusal")
    return refusals


def _engines(answer: object) -> list[object]:
    from kvarena.transfer.protocol import TransferEngine

    return [_having(engine, TransferEngine) for engine in _listed(answer)]


def _having(answer: object, protocol: type) -> object:
    wanted = [name for name in vars(protocol) if not name.startswith("_")]
    missing = [name for name in wanted if not hasattr(answer, name)]
    if missing:
        raise TypeError(
            f"it answered {answer!r}, which is not a {protocol.__name__}: it has no {', '.join(missing)}"
        )
    return answer


def _listed(answer: object) -> list[object]:
    if not isinstance(answer, Iterable) or isinstance(answer, (str, bytes)):
        raise TypeError(f"it answered {answer!r}, where a list belongs")
    return list(answer)


_CHECKS: dict[str, Callable[[object], object]] = {
    "kvarena_budget": _budget,
    "kvarena_driver": _driver,
    "kvarena_refusals": _refusals,
    "kvarena_transfer_engines": _engines,
}
