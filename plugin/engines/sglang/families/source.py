"""SGLang's source as text: looked up without importing it, in an installation or in a wheel."""

from __future__ import annotations

import ast
import importlib.util
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias, final

__all__ = ["Definition", "SglangSource"]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Folder: TypeAlias = "Path | zipfile.Path"


class Definition(NamedTuple):
    """A function or a class, and the module that defines it."""

    module: str
    node: Function | ast.ClassDef


@final
class SglangSource:
    """Functions and classes by dotted path; each file is parsed once.

    Reading files instead of objects shows what the release itself says, whatever other plugins have
    replaced in this process by now.

    Parameters
    ----------
    folder : Path or zipfile.Path
        What holds the package ``sglang``: a folder of ``sys.path``, or a wheel.
    """

    def __init__(self, folder: _Folder) -> None:
        self._folder = folder
        self._modules: dict[str, ast.Module | None] = {}

    @classmethod
    def installed(cls) -> SglangSource:
        """The one that ``import sglang`` would take.

        Raises
        ------
        FileNotFoundError
            There is none.
        """
        found = importlib.util.find_spec("sglang")
        locations = [] if found is None else list(found.submodule_search_locations or ())
        if not locations:
            raise FileNotFoundError("the package sglang is not installed")
        return cls(Path(locations[0]).parent)

    @classmethod
    def wheel(cls, path: Path) -> SglangSource:
        """A wheel, as it is on the index."""
        return cls(zipfile.Path(path))

    def find(self, path: str) -> Definition | None:
        """What is at a dotted path, through imports and base classes; None: it is not there."""
        parts = path.split(".")
        for end in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:end])
            if self._parsed(module) is not None:
                found = self._named(module, parts[end])
                for name in parts[end + 1 :]:
                    found = None if found is None else self.member(found, name)
                return found
        return None

    def member(self, owner: Definition, name: str) -> Definition | None:
        """A method, of the class itself or of the nearest base that has it."""
        return next(self.members(owner, name), None)

    def members(self, owner: Definition, name: str) -> Iterator[Definition]:
        """The method in the class and in each of its bases, nearest first."""
        for definition in self._with_bases(owner):
            for node in _statements(definition.node.body):
                if isinstance(node, Function) and node.name == name:
                    yield Definition(definition.module, node)

    def _with_bases(self, owner: Definition, seen: frozenset[str] = frozenset()) -> Iterator[Definition]:
        if not isinstance(owner.node, ast.ClassDef) or owner.node.name in seen:
            return
        yield owner
        for base in owner.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                found = self._named(owner.module, name.id)
                if found is not None:
                    yield from self._with_bases(found, seen | {owner.node.name})

    def _named(self, module: str, name: str, hops: int = 4) -> Definition | None:
        tree = self._parsed(module)
        if tree is None or hops == 0:
            return None
        elsewhere = None
        for node in _statements(tree.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
                return Definition(module, node)
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        elsewhere = node.module, alias.name
        return None if elsewhere is None else self._named(*elsewhere, hops - 1)

    def _parsed(self, module: str) -> ast.Module | None:
        if module not in self._modules:
            self._modules[module] = self._parse(module)
        return self._modules[module]

    def _parse(self, module: str) -> ast.Module | None:
        parts = module.split(".")
        if parts[0] != "sglang":
            return None
        *folders, last = parts
        folder = self._folder
        for part in folders:
            folder = folder / part
        for path in (folder / f"{last}.py", folder / last / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, also those under a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *(s for h in node.handlers for s in h.body), *node.orelse])
