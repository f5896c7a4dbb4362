"""Which family a release belongs to: by its number where it was tested, otherwise by its shapes."""

from __future__ import annotations

from kvarena.plugin.engines.sglang.families import v0_5_17, v0_5_20, v0_5_21, v0_5_22
from kvarena.plugin.engines.sglang.families.shapes import differences
from kvarena.plugin.engines.sglang.families.targets import Family, Support

__all__ = ["FAMILIES", "choose", "is_experimental", "support_of"]

#: Newest first: a release that nobody has tested yet is most like the last one.
FAMILIES: tuple[Family, ...] = (
    v0_5_22.FAMILY,
    v0_5_21.FAMILY,
    v0_5_20.FAMILY,
    v0_5_20.FAMILY_0_5_19,
    v0_5_17.FAMILY,
)


def choose(release: str, *, experimental: bool = False) -> tuple[Family | None, list[str]]:
    """The family whose shapes this release has.

    A release with a number that was never tested is tried against each family, the newest first: one
    that still has the shapes needs no code of ours.

    Parameters
    ----------
    release : str
        SGLang's version.
    experimental : bool
        Whether the operator opted in: otherwise an experimental release needs no more than a planner.

    Returns
    -------
    family : Family or None
        None: refused.
    reasons : list of str
        What differs from the family that was expected.
    """
    known = [family for family in FAMILIES if release in family.releases]
    reasons: list[str] = []
    for family in known or FAMILIES:
        # Only a release that is known is known to need no more: others have the same planner, too.
        planner_only = (
            known and support_of(family, release, experimental=experimental) is Support.PLANNER_ONLY
        )
        found = differences(family, shapes=(family.planner,)) if planner_only else differences(family)
        if not found:
            return family, []
        reasons = reasons or found  # a new release is compared with the newest family
    return None, reasons


def support_of(family: Family, release: str, *, experimental: bool) -> Support:
    """What the plugin does in a release of a family."""
    if release == "0.5.16" or (is_experimental(family, release) and not experimental):
        return Support.PLANNER_ONLY
    return family.layer


def is_experimental(family: Family, release: str) -> bool:
    """Whether a release is supported on request only; one that was never tested is as its family is."""
    return release in family.experimental or (release not in family.releases and bool(family.experimental))
