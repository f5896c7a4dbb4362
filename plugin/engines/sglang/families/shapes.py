"""Whether a release's functions take the parameters that a family says; checked before any is changed."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any

from kvarena.plugin.engines.sglang.families.targets import Family, HookKind, Shape, Target

__all__ = ["differences", "missing", "resolve"]


def resolve(path: str) -> Any:
    """The object at a dotted path; its module is imported.

    Raises
    ------
    LookupError
        There is none; the message says at which step, and why.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{path} is missing ({error})") from error
    except Exception as error:
        # Whatever a module raises while it is imported.
        raise LookupError(f"{path} cannot be imported ({type(error).__name__}: {error})") from error


def differences(family: Family, *, shapes: Iterable[Shape] | None = None) -> dict[str, str]:
    """What differs from the family: for each dotted path, how; empty: everything is as expected."""
    found = {}
    for shape in (*family.targets, *family.needs) if shapes is None else shapes:
        try:
            value = resolve(shape.path)
        except LookupError as error:
            if not (isinstance(shape, Target) and _is_absent(shape)):
                found[shape.path] = str(error)
            continue
        if isinstance(shape, Target) and shape.kind is HookKind.PROPERTY:
            if not isinstance(value, property) and callable(value):
                found[shape.path] = f"{shape.path} is not a property"
            continue
        difference = _signature_difference(shape, value)
        if difference:
            found[shape.path] = difference
    if shapes is None:
        found |= {path: f"{path} exists" for path in family.lacks if _exists(path)}
    return found


def missing(family: Family) -> tuple[Target, ...]:
    """The optional targets that this release or process does not have."""
    return tuple(target for target in family.targets if _is_absent(target))


def _is_absent(target: Target) -> bool:
    """Whether an optional target's class is not there; one without the method has another shape."""
    return target.optional and _owner(target.path) is None


def _exists(path: str) -> bool:
    owner = _owner(path)
    # Inherited members do not count: a later release is known by what its own class defines.
    return owner is not None and path.rpartition(".")[2] in vars(owner)


def _owner(path: str) -> Any:
    try:
        return resolve(path.rpartition(".")[0])
    except LookupError:
        return None


def _signature_difference(shape: Shape, value: Any) -> str:
    # HookRegistry sets __wrapped__, so a target that somebody has hooked already still shows its own.
    try:
        actual = inspect.signature(value)
    except (TypeError, ValueError) as error:
        return f"{shape.path} has no signature ({error})"
    if inspect.iscoroutinefunction(inspect.unwrap(value)):
        return f"{shape.path} is a coroutine"
    wanted = _parse(shape.signature)
    have = {
        name: (parameter.kind is parameter.KEYWORD_ONLY, parameter.default)
        for name, parameter in actual.parameters.items()
    }
    same = all(name in have and _agree(have[name], parameter) for name, parameter in wanted.items())
    # A new parameter without a default is required of whoever calls; one with a default may still be
    # given by SGLang itself, and then a handler has to hand it on.
    harmless = not isinstance(shape, Target) or _hands_on(shape)
    new = [
        name
        for name, (_, default) in have.items()
        if name not in wanted and (default is inspect.Parameter.empty or not harmless)
    ]
    positions = [name for name in have if name in wanted and not wanted[name][0]]
    if same and not new and positions == [name for name, (keyword, _) in wanted.items() if not keyword]:
        return ""
    return f"{shape.path}{actual_text(actual)} was expected as ({shape.signature})"


def _agree(have: tuple[bool, Any], wanted: tuple[bool, Any]) -> bool:
    """Whether a parameter is passed in the same way, and means the same when it is not passed."""
    (keyword, default), (wanted_keyword, wanted_default) = have, wanted
    return keyword == wanted_keyword and (
        default is wanted_default or (type(default) is type(wanted_default) and default == wanted_default)
    )


def _hands_on(target: Target) -> bool:
    """Whether a target's handler passes on keywords that it does not know."""
    handler = resolve(f"kvarena.plugin.engines.sglang.{target.handler}")
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(handler).parameters.values())


def actual_text(signature: inspect.Signature) -> str:
    """A signature without annotations, for a line in a log."""
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def _parse(signature: str) -> dict[str, tuple[bool, Any]]:
    """Parameter name to whether it is keyword-only, and its default."""
    function = ast.parse(f"def _({signature}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    found = dict(zip(positional, [*defaults, *given.defaults], strict=True))
    return {name: (False, _value(node)) for name, node in found.items()} | {
        argument.arg: (True, _value(node))
        for argument, node in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    }


def _value(node: ast.expr | None) -> Any:
    return inspect.Parameter.empty if node is None else ast.literal_eval(node)
