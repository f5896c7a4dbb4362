"""What kvarena changes in SGLang, as data: where, how, by which handler, and the shape that is expected."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Family", "HookKind", "Shape", "SizeRule", "Support", "Target", "Use"]


class HookKind(str, enum.Enum):
    """How a target is changed."""

    AROUND = "around"
    """Through SGLang's `HookRegistry`."""
    PROPERTY = "property"
    """Set on the class: `HookRegistry` turns a property into a function, which is always true."""


class Use(str, enum.Enum):
    """What a target is needed for: one that differs refuses this, and nothing else."""

    SIZING = "sizing"
    """The pool itself; without it, the release runs unmodified."""
    TRANSFERS = "transfers"
    """Every transfer out of the pool: PD, and direct linkers of HiCache."""
    MOONCAKE = "mooncake"
    """PD with ``--disaggregation-transfer-backend mooncake``."""
    NIXL = "nixl"
    """PD with ``--disaggregation-transfer-backend nixl``."""
    LINKER = "linker"
    """HiCache's direct linkers."""


class Support(enum.IntEnum):
    """What the plugin gives in a release."""

    PLANNER_ONLY = 1
    """The planner no longer promises what the release does not do."""
    BACKPORT = 2
    """Sizing after capture for the unified pool, which the release lacks."""
    NATIVE = 3
    """The release has it for hybrid-SWA models; its memory, ranks and failures become ours."""


class SizeRule(str, enum.Enum):
    """How a release derives a sub-pool's ``size`` from its pages."""

    SLOTS = "slots"
    """All slots but slot 0 (0.5.16 to 0.5.18)."""
    BLOCKS = "blocks"
    """Rows of kernel blocks, less one page (0.5.19 to 0.5.21)."""
    PAGES = "pages"
    """Slots of whole pages, less one page (0.5.22 and later)."""


@dataclass(frozen=True)
class Shape:
    """A function that must exist with these parameters."""

    path: str
    """Dotted, as ``pkgutil.resolve_name`` takes it."""
    signature: str
    """Its parameters as in a ``def``, without annotations: ``"self, *, total_bytes, page_size=1"``."""
    body: bool = True
    """Whether its body counts as well; not where the original is asked for its answer and nothing else."""


@dataclass(frozen=True)
class Target(Shape):
    """A shape that is changed."""

    handler: str = ""
    """``module:name`` of ours."""
    use: Use = Use.SIZING
    kind: HookKind = HookKind.AROUND
    optional: bool = False
    """A release without its class (or a process that cannot import it) is no reason to refuse."""


@dataclass(frozen=True)
class Family:
    """Releases that have the same shapes."""

    name: str
    releases: tuple[str, ...]
    """Those that were tested."""
    support: Support
    targets: tuple[Target, ...]
    needs: tuple[Shape, ...] = ()
    """Called by the handlers, not changed."""
    lacks: tuple[str, ...] = ()
    """Paths that must not exist: with them, the release belongs to a later family."""
    storing: tuple[str, ...] = ()
    """Classes whose attributes depend on a pool's size."""
    bodies: tuple[str, ...] = ()
    """Further functions and properties whose bodies count."""
    experimental: tuple[str, ...] = ()
    """Those of `releases` with the planner alone unless ``KVARENA_SGLANG_EXPERIMENTAL`` is set."""
    size_rule: SizeRule = SizeRule.PAGES
    shared_budget: bool = True
    """Both sides share the pool's bytes (0.5.21 and later); before, each has a fixed count of tokens."""
    budget_fields: tuple[str, ...] = ("unified_memory_pool_bytes",)
    """Fields of ``MemoryPoolConfig`` that hold the pool's bytes, the first one set counts."""
    ignores_unified: bool = False
    """The planner does not look at unified memory at all (up to 0.5.20)."""
    own_virtual_ids: bool = False
    """The window side's table has only as many rows as it has pages (up to 0.5.19, sglang#37560)."""

    @property
    def planner(self) -> Target:
        """The target that decides: it is looked at first, and is all that `Support.PLANNER_ONLY` needs."""
        return self.targets[0]
