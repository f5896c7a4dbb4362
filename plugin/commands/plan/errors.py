"""What planning refuses, and why."""

from __future__ import annotations

from kvarena.errors import KvArenaError
from kvarena.plugin.commands.plan.text import printable

__all__ = ["DoesNotFitError", "GeometryError", "ModelConfigError", "PlanError"]


class PlanError(KvArenaError):
    """A plan that cannot be made from what was given."""


class ModelConfigError(PlanError):
    """A model configuration that says too little, or something that cannot be.

    Parameters
    ----------
    key : str
        The key at fault, as a reader finds it in the file (``text_config.head_dim``).
    what : str
        What is wrong with it, with the value.
    fix : str, optional
        What to change.
    """

    def __init__(self, key: str, what: str, *, fix: str = "") -> None:
        super().__init__(f"{printable(key, 120)} {printable(what, 400)}.", fix=fix)
        self.key = key


class DoesNotFitError(PlanError):
    """Weights that leave no room for a cache on the card."""


class GeometryError(PlanError):
    """A model and a parallel layout that do not fit each other."""
