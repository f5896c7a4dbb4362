"""Which family a release belongs to, and whether its code is one that was tested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvarena.plugin.engines.sglang.families import v0_5_17, v0_5_20, v0_5_21, v0_5_22
from kvarena.plugin.engines.sglang.families.fingerprints import fingerprint_of, recorded
from kvarena.plugin.engines.sglang.families.shapes import differences, missing
from kvarena.plugin.engines.sglang.families.source import SglangSource
from kvarena.plugin.engines.sglang.families.targets import Family, Support, Target, Use

__all__ = ["FAMILIES", "Choice", "choose", "is_experimental", "support_of"]

#: Newest first: a release that nobody has tested yet is most like the last one.
FAMILIES: tuple[Family, ...] = (
    v0_5_22.FAMILY,
    v0_5_21.FAMILY,
    v0_5_20.FAMILY,
    v0_5_20.FAMILY_0_5_19,
    v0_5_17.FAMILY,
)


@dataclass(frozen=True)
class Choice:
    """What kvarena does in a release, and why not more."""

    family: Family | None = None
    """None: the release is refused."""
    support: Support | None = None
    reasons: tuple[str, ...] = ()
    """Why it is refused: what differs from the family that was expected."""
    compared: bool = False
    """Whether the shapes of what sizes pools fit, so that the code behind them was compared too."""
    untested: str = ""
    """Why nobody can have tested exactly this code; empty: it was tested."""
    unfit: Mapping[Target, str] = field(default_factory=dict)
    """Targets of transfers that differ, and how; what uses them is refused, and they are not hooked."""

    def targets(self) -> tuple[Target, ...]:
        """The targets that are hooked: none that is optional and absent, or unfit."""
        if self.family is None:
            return ()
        if self.support is Support.PLANNER_ONLY:
            return (self.family.planner,)
        left_out = {*missing(self.family), *self.unfit}
        return tuple(target for target in self.family.targets if target not in left_out)


def choose(release: str, *, experimental: bool = False, source: SglangSource | None = None) -> Choice:
    """The family whose shapes this release has, if its code was tested or does not differ from what was.

    A release with a number that was never tested is tried against each family, the newest first: one
    whose signatures, bodies and stored attributes are those of a tested release needs no code of ours.

    Parameters
    ----------
    release : str
        SGLang's version.
    experimental : bool
        Whether the operator opted in: otherwise an experimental release needs no more than a planner.
    source : SglangSource, optional
        The release's source; default: the installed one's.
    """
    known = [family for family in FAMILIES if release in family.releases]
    choices = []
    try:
        source = source or SglangSource.installed()
        for family in known or FAMILIES:
            choices.append(_compare(family, release, source, experimental=experimental))
            if not choices[-1].reasons:
                return choices[-1]
    except (SyntaxError, OSError, UnicodeError) as error:
        return Choice(reasons=(f"its source cannot be read ({error})",))
    # A new release that fits no family is compared with the one that it is most like.
    nearest = min(choices, key=lambda choice: (not choice.compared, len(choice.reasons)))
    return Choice(reasons=nearest.reasons)


def support_of(family: Family, release: str, *, experimental: bool) -> Support:
    """What the plugin does in a release of a family."""
    if release == "0.5.16" or (is_experimental(family, release) and not experimental):
        return Support.PLANNER_ONLY
    return family.support


def is_experimental(family: Family, release: str) -> bool:
    """Whether a release is supported on request only; one that was never tested is as its family is."""
    return release in family.experimental or (release not in family.releases and bool(family.experimental))


def _compare(family: Family, release: str, source: SglangSource, *, experimental: bool) -> Choice:
    """What a release gets if it belongs to a family; with reasons, if it does not."""
    support = support_of(family, release, experimental=experimental)
    tested = release in family.releases
    # Only a release that is known is known to need no more: others have the same planner, too.
    if tested and support is Support.PLANNER_ONLY:
        found = differences(family, shapes=(family.planner,))
        return Choice(family, support, reasons=tuple(found.values()))
    found, nearest = differences(family), ""
    compared = not any(_sizes(family, path) for path in found)
    if compared:
        nearest, code = _nearest(family, source, (release,) if tested else family.releases)
        found = code | found
    return Choice(
        family,
        support,
        reasons=tuple(text for path, text in found.items() if _sizes(family, path)),
        compared=compared,
        untested="" if tested and not found else _why_untested(release, nearest, tested=tested),
        unfit={target: found[target.path] for target in family.targets if target.path in found},
    )


def _sizes(family: Family, path: str) -> bool:
    """Whether what is at a path matters to the pool itself, and not to transfers alone."""
    return all(target.path != path or target.use is Use.SIZING for target in family.targets)


def _nearest(family: Family, source: SglangSource, releases: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The tested release whose code differs least, the newest of several, and how it differs."""
    have = fingerprint_of(family, source)
    found = {
        release: have.differences(recorded()[release], release)
        for release in releases
        if release in recorded()
    }
    if not found:
        return "", {family.name: f"no fingerprint of {family.name} is recorded"}
    nearest = min(reversed(found), key=lambda release: len(found[release]))
    return nearest, found[nearest]


def _why_untested(release: str, nearest: str, *, tested: bool) -> str:
    if tested:
        return f"this SGLang {release} is not the one that was tested, from which its transfers differ"
    return f"SGLang {release} was never tested; where kvarena changes or calls it, its code is {nearest}'s"
