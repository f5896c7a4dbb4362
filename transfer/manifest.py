"""What an arena's pages mean, compared before the first byte moves."""

from __future__ import annotations

import msgspec
from kvarena.transfer.errors import Difference, ManifestMismatch

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
        if list(ours) != list(theirs):
            differences.append(Difference("sub_pools", list(ours), list(theirs)))
        for name in ours.keys() & theirs.keys():
            differences.extend(
                Difference(f"{name}.{field}", getattr(ours[name], field), getattr(theirs[name], field))
                for field in SubPoolManifest.__struct_fields__
                if getattr(ours[name], field) != getattr(theirs[name], field)
            )
        if differences:
            raise ManifestMismatch(sorted(differences, key=lambda difference: difference.field))

    def sub_pool(self, name: str) -> SubPoolManifest:
        """One sub-pool's geometry by its name."""
        return next(sub_pool for sub_pool in self.sub_pools if sub_pool.name == name)

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
