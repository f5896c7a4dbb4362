"""How one kind of KV lies in memory: entries, page envelopes, and the per-layer views.

All sub-pools are page-major: a page's bytes, of all layers, are contiguous
(the *envelope*), so that a page moves with one copy. Inside an envelope the
order is layer, part (K, then V), token, head, dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, final

import torch
from kvarena.pool.errors import LayoutError

__all__ = [
    "GrowDirection",
    "MHASubPoolSpec",
    "MLASubPoolSpec",
    "MambaSubPoolSpec",
    "Part",
    "SubPoolSpec",
    "chain_order",
]

GrowDirection = Literal["up", "down", "float"]


class Part(NamedTuple):
    """One tensor that each layer has in each page envelope."""

    name: str
    offset: int
    """Bytes from the envelope's start."""
    shape: tuple[int, ...]
    """Of one page."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in one page."""
        return math.prod(self.shape) * self.dtype.itemsize


class SubPoolSpec(Protocol):
    """What a pool asks of a sub-pool's description; implement it to add another kind of KV."""

    @property
    def name(self) -> str:
        """Unique in its pool."""
        ...

    @property
    def grow_direction(self) -> GrowDirection:
        """From the low end up, from the high end down, or between the two."""
        ...

    @property
    def layer_num(self) -> int:
        """Layers of this kind on this rank."""
        ...

    def slots_per_page(self, page_size: int) -> int:
        """Slots in an envelope, in a pool whose pages have `page_size` tokens."""
        ...

    def entry_bytes(self) -> int:
        """Bytes of one slot, all layers."""
        ...

    def page_envelope_bytes(self, page_size: int) -> int:
        """Bytes of one page, all layers."""
        ...

    def layer_parts(self, layer: int, page_size: int) -> tuple[Part, ...]:
        """The tensors of one layer (0 to ``layer_num - 1``)."""
        ...


@final
@dataclass(frozen=True)
class MHASubPoolSpec:
    """Keys and values of attention layers (MHA, GQA, MQA), full or sliding.

    Parameters
    ----------
    name : str
        Unique in its pool.
    grow_direction : {"up", "down", "float"}
        Which end of the arena it grows from.
    layer_num, head_num, head_dim : int
        Layers and KV heads of this rank; elements of a key head.
    dtype : torch.dtype
        Of keys and values.
    v_head_dim : int, optional
        Elements of a value head, where it differs.

    Raises
    ------
    LayoutError
        A field cannot be used.
    """

    name: str
    grow_direction: GrowDirection
    layer_num: int
    head_num: int
    head_dim: int
    dtype: torch.dtype
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        _check(self, (self.dtype,), "layer_num", "head_num", "head_dim", "v_dim")

    @property
    def v_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def slots_per_page(self, page_size: int) -> int:
        """`page_size`."""
        return page_size

    def entry_bytes(self) -> int:
        """Bytes of one token, all layers: layers × heads × (key + value elements) × element size."""
        return self.layer_num * self.head_num * (self.head_dim + self.v_dim) * self.dtype.itemsize

    def page_envelope_bytes(self, page_size: int) -> int:
        """Bytes of one page, all layers."""
        return page_size * self.entry_bytes()

    def layer_parts(self, layer: int, page_size: int) -> tuple[Part, ...]:
        """``k`` and ``v``, each ``(page_size, head_num, dim)``."""
        start = layer * (self.page_envelope_bytes(page_size) // self.layer_num)
        k = Part("k", start, (page_size, self.head_num, self.head_dim), self.dtype)
        v = Part("v", start + k.nbytes, (page_size, self.head_num, self.v_dim), self.dtype)
        return k, v


@final
@dataclass(frozen=True)
class MLASubPoolSpec:
    """The latent of MLA layers: one vector a token, whatever the number of heads.

    Parameters
    ----------
    name : str
        Unique in its pool.
    grow_direction : {"up", "down", "float"}
        Which end of the arena it grows from.
    layer_num : int
        Layers of this rank.
    kv_lora_rank, qk_rope_head_dim : int
        Elements of the latent, and of the rotary key behind it.
    dtype : torch.dtype
        Of both.

    Raises
    ------
    LayoutError
        A field cannot be used.
    """

    name: str
    grow_direction: GrowDirection
    layer_num: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _check(self, (self.dtype,), "layer_num", "kv_lora_rank", "qk_rope_head_dim")

    @property
    def latent_dim(self) -> int:
        """Elements of one token in one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def slots_per_page(self, page_size: int) -> int:
        """`page_size`."""
        return page_size

    def entry_bytes(self) -> int:
        """Bytes of one token, all layers: layers × (latent + rope elements) × element size."""
        return self.layer_num * self.latent_dim * self.dtype.itemsize

    def page_envelope_bytes(self, page_size: int) -> int:
        """Bytes of one page, all layers."""
        return page_size * self.entry_bytes()

    def layer_parts(self, layer: int, page_size: int) -> tuple[Part, ...]:
        """``k``: ``(page_size, 1, latent + rope)``; the view ``v`` is its first `kv_lora_rank` elements."""
        start = layer * (self.page_envelope_bytes(page_size) // self.layer_num)
        return (Part("k", start, (page_size, 1, self.latent_dim), self.dtype),)


@final
@dataclass(frozen=True)
class MambaSubPoolSpec:
    """The states of Mamba layers: one slot a request, so a page is one state.

    Parameters
    ----------
    name : str
        Unique in its pool.
    grow_direction : {"up", "down", "float"}
        Which end of the arena it grows from.
    layer_num : int
        Layers of this rank.
    conv_shapes : sequence of tuple of int
        Shapes of one layer's convolution states (one for Mamba 2).
    temporal_shape : tuple of int
        Shape of one layer's recurrent state.
    conv_dtype, temporal_dtype : torch.dtype
        Their types; the recurrent state is float32 in most models.

    Raises
    ------
    LayoutError
        A field cannot be used.
    """

    name: str
    grow_direction: GrowDirection
    layer_num: int
    conv_shapes: tuple[tuple[int, ...], ...]
    temporal_shape: tuple[int, ...]
    conv_dtype: torch.dtype
    temporal_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        _check(self, (self.conv_dtype, self.temporal_dtype), "layer_num")
        for shape in (*self.conv_shapes, self.temporal_shape):
            if not shape or any(not _is_count(size) for size in shape):
                raise LayoutError(
                    f"Sub-pool {self.name!r} has a state of shape {shape!r}.", fix="Give positive sizes."
                )

    def slots_per_page(self, page_size: int) -> int:
        """1: a state belongs to a request, not to tokens."""
        return 1

    def entry_bytes(self) -> int:
        """Bytes of one request's state, all layers, with what aligning its parts takes."""
        return self.layer_num * self._layer_bytes()

    def page_envelope_bytes(self, page_size: int = 1) -> int:
        """`entry_bytes`, whatever the page size of the pool."""
        return self.entry_bytes()

    def layer_parts(self, layer: int, page_size: int = 1) -> tuple[Part, ...]:
        """``conv0``, ``conv1`` ... and ``temporal``."""
        parts = []
        offset = layer * self._layer_bytes()
        for name, shape, dtype in self._states():
            offset = _align(offset, dtype.itemsize)
            parts.append(Part(name, offset, tuple(shape), dtype))
            offset += parts[-1].nbytes
        return tuple(parts)

    def _states(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        for index, shape in enumerate(self.conv_shapes):
            yield f"conv{index}", shape, self.conv_dtype
        yield "temporal", self.temporal_shape, self.temporal_dtype

    def _layer_bytes(self) -> int:
        offset, widest = 0, 1
        for _, shape, dtype in self._states():
            offset = _align(offset, dtype.itemsize) + math.prod(shape) * dtype.itemsize
            widest = max(widest, dtype.itemsize)
        return _align(offset, widest)


def chain_order(specs: Sequence[SubPoolSpec]) -> tuple[SubPoolSpec, ...]:
    """The order along the arena: the one that grows up, the floats, the one that grows down.

    Raises
    ------
    LayoutError
        There is none, two share a name, or two claim one end.
    """
    if not specs:
        raise LayoutError("A pool without sub-pools was asked for.", fix="Give at least one sub-pool.")
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LayoutError(f"Several sub-pools are called {', '.join(twice)}.", fix="Give each its own name.")
    ends: dict[str, list[SubPoolSpec]] = {"up": [], "float": [], "down": []}
    for spec in specs:
        ends[spec.grow_direction].append(spec)
    for end in ("up", "down"):
        if len(ends[end]) > 1:
            both = " and ".join(spec.name for spec in ends[end])
            raise LayoutError(f"Sub-pools {both} all grow {end}.", fix='Let one of them be "float".')
    return (*ends["up"], *ends["float"], *ends["down"])


def _check(spec: SubPoolSpec, dtypes: Sequence[object], *counts: str) -> None:
    if not isinstance(spec.name, str) or not spec.name:
        raise LayoutError(f"A sub-pool has the name {spec.name!r}.", fix="Give it a name.")
    if spec.grow_direction not in ("up", "down", "float"):
        raise LayoutError(
            f"Sub-pool {spec.name!r} has grow_direction {spec.grow_direction!r}.",
            fix='Use "up", "down" or "float".',
        )
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype):
            raise LayoutError(f"Sub-pool {spec.name!r} has dtype {dtype!r}.", fix="Give a torch.dtype.")
    for field in counts:
        value = getattr(spec, field)
        if not _is_count(value):
            raise LayoutError(
                f"Sub-pool {spec.name!r} has {field} {value!r}.", fix="Give a positive whole number."
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _align(offset: int, width: int) -> int:
    return -(-offset // width) * width
