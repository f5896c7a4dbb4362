"""From what a pool reports to the regions that an engine should hold: arithmetic only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

from kvarena.transfer.errors import RegistrationError
from kvarena.transfer.protocol import BufferInfos, Capabilities, Region

__all__ = ["PastBacked", "coalesce", "cut", "overlapping", "plan_regions", "seams_between", "subtract"]

PastBacked = Literal["clip", "refuse"]

# Pieces of a region that is too large start at multiples of this, as memory registration wants.
_PIECE_ALIGNMENT = 4096


def plan_regions(
    wanted: BufferInfos | Sequence[Region],
    *,
    backed: Region,
    capabilities: Capabilities,
    engine: str = "engine",
    handle_seams: Sequence[int] = (),
    past_backed: PastBacked = "clip",
) -> tuple[Region, ...]:
    """The fewest regions that cover what is wanted and backed, and that the engine can hold.

    Parameters
    ----------
    wanted : BufferInfos or sequence of Region
        Aliases of one base, overlaps and empty entries are allowed, as pools with several
        sub-pools over one arena report them.
    backed : Region
        The bytes that have memory.
    capabilities : Capabilities
        Of the engine: a region is cut at handle seams unless it may span handles, and into
        pieces of at most ``max_region_bytes``.
    handle_seams : sequence of int
        Absolute addresses where two physical handles meet.
    past_backed : {"clip", "refuse"}
        What happens to a region that starts in backed memory and ends past it.

    Raises
    ------
    RegistrationError
        A region with a negative length or address, one that starts where nothing is backed,
        one that ends past it under ``"refuse"``, or an engine limit too small to obey.
    """
    limit = capabilities.max_region_bytes
    if limit is not None and limit < 1:
        raise RegistrationError(engine, backed, None, meaning=f"the engine's largest region is {limit} bytes")
    inside: list[Region] = []
    for region in _regions_of(wanted, engine):
        if region.nbytes == 0:
            continue
        if not backed.address <= region.address < backed.end:
            raise _not_backed(engine, region, backed, "starts where nothing is backed")
        if region.end > backed.end:
            if past_backed == "refuse":
                raise _not_backed(
                    engine, region, backed, f"ends {region.end - backed.end} bytes past backed memory"
                )
            region = Region(region.address, backed.end - region.address)
        inside.append(region)
    merged = coalesce(inside)
    if not capabilities.spans_handles:
        merged = cut(merged, handle_seams)
    if limit is not None:
        merged = tuple(piece for region in merged for piece in _pieces(region, limit))
    return merged


def coalesce(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The union, as the fewest regions in ascending order; adjacent ones become one."""
    merged: list[Region] = []
    for region in sorted(regions):
        if region.nbytes == 0:
            continue
        if merged and region.address <= merged[-1].end:
            last = merged[-1]
            merged[-1] = Region(last.address, max(last.end, region.end) - last.address)
        else:
            merged.append(region)
    return tuple(merged)


def cut(regions: Iterable[Region], seams: Sequence[int]) -> tuple[Region, ...]:
    """The same bytes, with a border at every seam that lies inside a region."""
    borders = sorted(set(seams))
    pieces: list[Region] = []
    for region in regions:
        start = region.address
        for border in borders:
            if start < border < region.end:
                pieces.append(Region(start, border - start))
                start = border
        pieces.append(Region(start, region.end - start))
    return tuple(pieces)


def subtract(regions: Iterable[Region], taken: Iterable[Region]) -> tuple[Region, ...]:
    """The bytes of `regions` that no region of `taken` covers."""
    holes = coalesce(taken)
    left: list[Region] = []
    for region in regions:
        start = region.address
        for hole in holes:
            if hole.end <= start or hole.address >= region.end:
                continue
            if hole.address > start:
                left.append(Region(start, hole.address - start))
            start = hole.end
        if start < region.end:
            left.append(Region(start, region.end - start))
    return tuple(left)


def overlapping(region: Region, held: Iterable[Region]) -> Region | None:
    """The first of `held` that has a byte in common with `region`."""
    return next((h for h in held if region.address < h.end and h.address < region.end), None)


def seams_between(regions: Iterable[Region]) -> tuple[int, ...]:
    """Addresses at which one region ends and another begins."""
    ordered = sorted(regions)
    return tuple(b.address for a, b in itertools.pairwise(ordered) if a.end == b.address)


def _regions_of(wanted: BufferInfos | Sequence[Region], engine: str) -> list[Region]:
    if isinstance(wanted, BufferInfos):
        if len(wanted.ptrs) != len(wanted.lens):
            nothing = Region(0, 0)
            raise RegistrationError(
                engine, nothing, None, meaning=f"{len(wanted.ptrs)} pointers with {len(wanted.lens)} lengths"
            )
        pairs = list(zip(wanted.ptrs, wanted.lens, strict=True))
    else:
        pairs = [(region[0], region[1]) for region in wanted]
    regions = [Region(int(address), int(nbytes)) for address, nbytes in pairs]
    for region in regions:
        if region.nbytes < 0 or region.address < 0:
            raise RegistrationError(engine, region, None, meaning="negative address or length")
    return regions


def _not_backed(engine: str, region: Region, backed: Region, why: str) -> RegistrationError:
    return RegistrationError(
        engine,
        region,
        None,
        meaning=f"{why} ([{backed.address:#x}, +{backed.nbytes}) is)",
        fix="Back the memory first, then register it.",
    )


def _pieces(region: Region, limit: int) -> list[Region]:
    step = limit // _PIECE_ALIGNMENT * _PIECE_ALIGNMENT or limit
    return [Region(start, min(step, region.end - start)) for start in range(region.address, region.end, step)]
