"""What an arena's pages mean, compared before the first byte moves."""

from __future__ import annotations

from operator import index

import msgspec
from kvarena.transfer.errors import Difference, ManifestMismatch, PageError
from msgspec.structs import force_setattr

__all__ = ["Manifest", "SubPoolManifest"]


class SubPoolManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The geometry of one sub-pool on one rank."""

    name: str
    page_bytes: int
    """Bytes of one page envelope: all layers, keys and values."""
    page_size: int
    """Tokens of one page."""
    layers: tuple[int, ...]
    """The model's layers whose KV it holds, in the order of the envelope."""
    dtype: str
    """As torch names it, without ``torch.``."""
    kind: str = "mha"
    """``"mha"``, ``"mla"`` or ``"mamba"``: what an envelope holds for a layer."""
    parallel_slice: tuple[int, int] = (0, 1)
    """Which tensor-parallel slice of the heads, of how many."""

    def __post_init__(self) -> None:
        """A list or NumPy's numbers are what they say: the peer's come as tuples of Python's numbers."""
        for field in ("page_bytes", "page_size"):
            force_setattr(self, field, index(getattr(self, field)))
        for field in ("layers", "parallel_slice"):
            force_setattr(self, field, tuple(map(index, getattr(self, field))))


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The geometry of an arena: what both sides of a transfer must have in common.

    It holds no address and no capacity: two arenas of different sizes fit together.
    """

    sub_pools: tuple[SubPoolManifest, ...]
    layout: str = "page-major"
    version: int = 1

    def check(self, peer: Manifest) -> None:
        """Compare with a peer's.

        Raises
        ------
        ManifestMismatch
            Naming every field that differs, with both values.
        """
        differences = [
            Difference(name, getattr(self, name), getattr(peer, name))
            for name in ("version", "layout")
            if getattr(self, name) != getattr(peer, name)
        ]
        ours = {sub_pool.name: sub_pool for sub_pool in self.sub_pools}
        theirs = {sub_pool.name: sub_pool for sub_pool in peer.sub_pools}
        names = [[sub_pool.name for sub_pool in side.sub_pools] for side in (self, peer)]
        if names[0] != names[1]:
            differences.append(Difference("sub_pools", *names))
        for name in ours.keys() & theirs.keys():
            differences.extend(
                Difference(f"{name}.{field}", getattr(ours[name], field), getattr(theirs[name], field))
                for field in SubPoolManifest.__struct_fields__
                if getattr(ours[name], field) != getattr(theirs[name], field)
            )
        if differences:
            raise ManifestMismatch(sorted(differences, key=lambda difference: difference.field))

    def sub_pool(self, name: str) -> SubPoolManifest:
        """One sub-pool's geometry by its name. Raises `PageError` if there is none."""
        for sub_pool in self.sub_pools:
            if sub_pool.name == name:
                return sub_pool
        raise PageError(f"There is no sub-pool {name!r}, only {[each.name for each in self.sub_pools]}.")

    def encode(self) -> bytes:
        """For the control plane."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Manifest:
        """From a peer.

        Raises
        ------
        ManifestMismatch
            The bytes are no manifest.
        """
        try:
            return msgspec.msgpack.decode(encoded, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ManifestMismatch([Difference("manifest", "a kvarena manifest", str(error))]) from error
