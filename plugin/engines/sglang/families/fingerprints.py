"""What the code of each tested release was: the bodies of what is replaced, and the attributes it stores."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

from kvarena.plugin.engines.sglang.families.source import Definition, SglangSource
from kvarena.plugin.engines.sglang.families.targets import Family

__all__ = ["RECORDED", "Fingerprint", "fingerprint_of", "recorded"]

RECORDED = Path(__file__).with_name("fingerprints.json")
"""Written by ``tools/sglang_fingerprints.py`` from the wheels."""

#: Where sizes are stored, besides what these call on ``self``.
_STORING = ("__init__", "_set_capacity", "resize", "finalize_backing")
#: Fields of a node that do not change what it does, or that not every Python has.
_LEFT_OUT = frozenset(
    {"annotation", "ctx", "end_col_offset", "kind", "returns", "type_comment", "type_ignores", "type_params"}
)
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fingerprint:
    """The code of one release, as far as kvarena depends on more than its signatures."""

    bodies: Mapping[str, str | None]
    """Dotted path of a function to a digest of its body; None: the release has none there."""
    attributes: Mapping[str, frozenset[str]]
    """Dotted path of a class to the attributes that its constructor and its resizing methods store."""

    def differences(self, tested: Fingerprint, release: str) -> dict[str, str]:
        """What differs from a tested release: for each dotted path, how.

        Parameters
        ----------
        tested : Fingerprint
            What is recorded of that release.
        release : str
            Its number, for the text.
        """
        found = {}
        for path in tested.bodies.keys() | self.bodies.keys():
            have, wanted = self.bodies.get(path), tested.bodies.get(path)
            if have != wanted:
                what = "is new" if wanted is None else "is gone" if have is None else "has another body"
                found[path] = f"{path} {what} since {release}"
        for path in tested.attributes.keys() | self.attributes.keys():
            names, wanted_names = self.attributes.get(path, _NONE), tested.attributes.get(path, _NONE)
            changes = [f"stores {name!r}" for name in sorted(names - wanted_names)]
            changes += [f"no longer stores {name!r}" for name in sorted(wanted_names - names)]
            if changes:
                found[path] = f"{path} {' and '.join(changes)}, unlike {release}"
        return dict(sorted(found.items()))


def fingerprint_of(family: Family, source: SglangSource) -> Fingerprint:
    """The fingerprint of a release's source, of all that a family names."""
    shapes = (*family.targets, *family.needs)
    functions = [*(shape.path for shape in shapes if shape.body), *family.bodies]
    return Fingerprint(
        bodies={path: _digest(source.find(path)) for path in functions},
        attributes={path: frozenset(_stored(source, path)) for path in family.storing},
    )


@cache
def recorded() -> Mapping[str, Fingerprint]:
    """Of every tested release, by its number."""
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    return {
        release: Fingerprint(
            bodies=each["bodies"],
            attributes={path: frozenset(names.split()) for path, names in each["attributes"].items()},
        )
        for release, each in found.items()
    }


def _digest(found: Definition | None) -> str | None:
    if found is None:
        return None
    return hashlib.sha256("\n".join(_normalized(found.node)).encode()).hexdigest()[:16]


def _normalized(value: object) -> Iterator[str]:
    """A syntax tree as lines: without positions, annotations and docstrings, the same in every Python."""
    if isinstance(value, ast.AST):
        yield type(value).__name__
        for name, field in ast.iter_fields(value):
            if name in _LEFT_OUT or (field in (None, []) and not isinstance(value, ast.Constant)):
                continue
            if name == "body" and isinstance(field, list) and _is_docstring(field[0]):
                field = field[1:]
            yield f".{name}"
            yield from _normalized(field)
    elif isinstance(value, list):
        yield "["
        for each in value:
            yield from _normalized(each)
        yield "]"
    else:
        yield repr(value)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _stored(source: SglangSource, path: str) -> Iterator[str]:
    """Attributes that a class stores in itself where sizes are set, in its bases and helpers too."""
    owner = source.find(path)
    if owner is None:
        return
    waiting, seen = list(_STORING), set(_STORING)
    while waiting:
        for method in source.members(owner, waiting.pop()):
            for node in ast.walk(method.node):
                if not _is_of_self(node):
                    continue
                if isinstance(node.ctx, ast.Store):
                    yield node.attr
                elif node.attr not in seen:  # perhaps a method: what it stores counts too
                    seen.add(node.attr)
                    waiting.append(node.attr)


def _is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
