"""Stand-ins that let a real SGLang wheel be imported on a machine without CUDA.

Three things are replaced, and nothing else:

- ``triton``, whose kernels cannot run here (SGLang takes its own torch branch on the CPU);
- ``torchvision``, whose published builds do not load on the CPU build of torch;
- transformers' dummy objects, which stand for classes that need torchvision: SGLang registers
  processors on one of them at import.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__all__ = ["install"]


class _Anything(types.ModuleType):
    """A module that has every attribute: classes for capitalised names, sub-modules for the others.

    Called as a decorator, with arguments or without, it hands the function back.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = f"<mock {name}>"
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (_AnyClass,), {"__module__": self.__name__}) if name[0].isupper() else None
        if value is None:
            value = sys.modules.setdefault(f"{self.__name__}.{name}", _Anything(f"{self.__name__}.{name}"))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bare = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType)
        return args[0] if bare else lambda function: function


class _AnyClass:
    """Takes every argument, and every subscript in an annotation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class _Finder:
    """Answers imports below the mocked names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def install() -> None:
    """Put the stand-ins in place; call it before the first import of SGLang."""
    import torch  # noqa: F401 - torch looks for the real triton while it is imported
    from transformers.utils import import_utils

    # Remembered by transformers: a mock that appears later must not look like an installed package.
    import_utils.is_torchvision_available()
    import_utils.DummyObject.__getattribute__ = _dummy_attribute
    triton = _Anything("triton")
    triton.__version__ = "3.7.0"
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()
    language = _Anything("triton.language")
    for name in ("constexpr", "dtype", "tensor"):
        setattr(language, name, type(name, (_AnyClass,), {}))
    triton.language = language
    sys.modules |= {"triton": triton, "triton.language": language}
    sys.meta_path.append(_Finder(("triton", "torchvision")))


def _dummy_attribute(cls: type, name: str) -> Any:
    try:
        return type.__getattribute__(cls, name)
    except AttributeError:
        if name.startswith("__"):
            raise
        return lambda *args, **kwargs: None
