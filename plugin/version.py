"""Which kvarena runs here."""

from __future__ import annotations

import importlib.metadata

__all__ = ["kvarena_version"]


def kvarena_version() -> str:
    """The installed distribution's version; a checkout on the path, as on GPU hosts, has none."""
    try:
        return importlib.metadata.version("kvarena")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"
