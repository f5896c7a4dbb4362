"""What a model keeps per token and per request, layer by layer, before it is split over ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from kvarena.plugin.commands.plan.errors import GeometryError

__all__ = [
    "IndexRow",
    "KVRow",
    "LayerCache",
    "MLARow",
    "ModelGeometry",
    "Span",
    "StateShape",
    "heads_per_rank",
]


class Span(str, Enum):
    """Which tokens a layer's attention keeps."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"


def heads_per_rank(heads: int, tp: int, *, key: str = "num_key_value_heads") -> int:
    """KV heads that one tensor-parallel rank stores.

    A head is split off to each rank while there are enough; beyond that each is stored by several
    ranks. In between, no engine can place them.

    Raises
    ------
    GeometryError
        Neither number divides the other.
    """
    if heads % tp == 0:
        return heads // tp
    if tp % heads == 0:
        return 1
    raise GeometryError(
        f"{key} is {heads}, which cannot be placed on tensor-parallel size {tp}.",
        fix=f"Choose a --tp that divides {heads} or is a multiple of it.",
    )


@dataclass(frozen=True, slots=True)
class KVRow:
    """One token's keys and values in one layer."""

    kv_heads: int
    head_dim: int
    v_head_dim: int

    def elements(self, tp: int) -> int:
        return heads_per_rank(self.kv_heads, tp) * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class MLARow:
    """One token's latent and its rope part in one layer: the same row on every rank.

    `fp8_scaled` says that an fp8 cache keeps scales beside it, as sparse attention does.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    fp8_scaled: bool = False

    def elements(self, tp: int) -> int:
        del tp  # not sharded
        return self.kv_lora_rank + self.qk_rope_head_dim

    def scaled_bytes(self) -> int:
        """Bytes of an fp8 row of sparse attention: fp32 scales per block of 128, and the rope in 16 bits.

        SGLang 0.5.23, ``calculate_mla_kv_cache_dim``; its trtllm and tilelang backends keep neither.
        """
        return self.kv_lora_rank + self.kv_lora_rank // 128 * 4 + 2 * self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One token's key in a sparse-attention indexer: bytes that are the same on every rank."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """One request's recurrent state in one layer.

    Parameters
    ----------
    mixer : str
        ``"mamba2"``, ``"mamba1"``, ``"gated delta net"``, ``"kda"``, ``"lightning"``,
        ``"short conv"`` or ``"rg-lru"``.
    inner : int
        Convolution channels that are split by heads.
    groups, group_width : int
        Groups beside them, and channels of one (B and C of Mamba 2, query and key of a delta net).
    taps : int
        Past inputs that the convolution keeps: its kernel less one.
    heads : int
        Heads (or channels) of the temporal state, split over ranks.
    head_elements : int
        Temporal elements of one head.
    """

    mixer: str
    inner: int
    groups: int
    group_width: int
    taps: int
    heads: int
    head_elements: int

    def conv_elements(self, tp: int) -> int:
        """Elements of the convolution's window on one rank.

        With more ranks than groups, each rank keeps the group that its heads use.
        """
        if self.inner % tp:
            raise GeometryError(
                f"The {self.mixer} state has {self.inner} channels, not a multiple of "
                f"tensor-parallel size {tp}.",
                fix="Choose another --tp.",
            )
        groups = (
            heads_per_rank(self.groups, tp, key=f"Groups of the {self.mixer} state") if self.groups else 0
        )
        return (self.inner // tp + groups * self.group_width) * self.taps

    def temporal_elements(self, tp: int) -> int:
        """Elements of the recurrent state on one rank."""
        if self.heads % tp:
            raise GeometryError(
                f"The {self.mixer} state has {self.heads} heads, not a multiple of "
                f"tensor-parallel size {tp}.",
                fix="Choose another --tp.",
            )
        return self.heads // tp * self.head_elements


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps: a row per token, a state per request, both, or nothing."""

    row: KVRow | MLARow | None = None
    span: Span = Span.FULL
    window: int | None = None
    index: IndexRow | None = None
    state: StateShape | None = None


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A whole model's caches.

    Parameters
    ----------
    model_type : str
        As in the file; a label only.
    layers : tuple of LayerCache
        All layers that serve a token, drafts and multi-token prediction not among them.
    attention_heads : int or None
        Query heads, for the remark that a tensor-parallel size does not divide them.
    context_len : int or None
        Tokens of the longest request that the model was made for.
    dtype : str or None
        The dtype that the file states.
    kv_dtype : str or None
        The dtype that the file wants its KV cache in, where that differs.
    state_dtype : str or None
        The dtype that the file wants its recurrent state in.
    mtp_layers : int
        Layers for multi-token prediction that the file mentions; not counted.
    notes : tuple of str
        What was assumed while reading.
    """

    model_type: str
    layers: tuple[LayerCache, ...]
    attention_heads: int | None = None
    context_len: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    state_dtype: str | None = None
    mtp_layers: int = 0
    notes: tuple[str, ...] = ()

    @property
    def mla(self) -> bool:
        return any(isinstance(layer.row, MLARow) for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        return any(layer.state is not None for layer in self.layers)

    def layer_counts(self) -> dict[str, int]:
        """Layers by what they keep: ``full``, ``sliding``, ``chunked``, ``linear``, ``none``.

        A layer with both attention and a state counts in both.
        """
        counts: Counter[str] = Counter({"full": 0, "sliding": 0, "chunked": 0, "linear": 0, "none": 0})
        for layer in self.layers:
            if layer.row is not None:
                counts[layer.span.value] += 1
            if layer.state is not None:
                counts["linear"] += 1
            if layer.row is None and layer.state is None:
                counts["none"] += 1
        return dict(counts)
