"""One rank's share of a model: its sub-pools, as the unified pool lays them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvarena.plugin.commands.plan.errors import GeometryError, PlanError
from kvarena.plugin.commands.plan.geometry import (
    KVRow,
    LayerCache,
    MLARow,
    ModelGeometry,
    Span,
    heads_per_rank,
)

__all__ = [
    "DTYPE_BYTES",
    "FP4",
    "CacheDtypes",
    "RankGeometry",
    "SubPool",
    "rank_geometry",
    "split_layers",
    "stages",
    "with_drafts",
]

#: Bytes of one element, by the names that engines' options and model files use.
DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
#: Two elements a byte, and a byte of scale for each 16 (SGLang 0.5.23, ``pool_configurator.py``).
FP4 = "fp4_e2m1"


@dataclass(frozen=True, slots=True)
class CacheDtypes:
    """Names of the dtypes that the caches are kept in."""

    kv: str = "bfloat16"
    conv: str = "bfloat16"
    temporal: str = "float32"

    def __post_init__(self) -> None:
        for name in (self.kv, self.conv, self.temporal):
            if name not in DTYPE_BYTES and (name, self.kv) != (FP4, FP4):
                raise PlanError(
                    f"No cache is kept in dtype {name!r} here.", fix=f"Use one of {', '.join(DTYPE_BYTES)}."
                )


@dataclass(frozen=True, slots=True)
class SubPool:
    """One kind of cache on one rank.

    Parameters
    ----------
    name : str
        ``full``, ``swa``, ``chunked``, ``indexer`` or ``mamba``; several windows are told apart by
        their length (``swa-1024``).
    kind : str
        The name without the window.
    layers : tuple of int
        The model's layer numbers that live here.
    layer_bytes : tuple of int
        Bytes of one slot in each of them.
    per_request : bool
        Whether a slot belongs to a request (a state, page size 1) and not to a token.
    window : int or None
        Tokens that a request keeps at most.
    row : KVRow, MLARow or None
        The row, where all layers have the same one.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    per_request: bool = False
    window: int | None = None
    row: KVRow | MLARow | None = None

    @property
    def entry_bytes(self) -> int:
        """Bytes of one slot (a token's, or a request's), all layers."""
        return sum(self.layer_bytes)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page envelope; a state is a page of its own."""
        return self.entry_bytes if self.per_request else self.entry_bytes * page_size


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """One rank's sub-pools, low end of the arena first."""

    stage: int
    tp: int
    layers: range
    sub_pools: tuple[SubPool, ...] = field(default=())

    def get(self, kind: str) -> SubPool | None:
        """The first sub-pool of a kind."""
        return next((pool for pool in self.sub_pools if pool.kind == kind), None)

    @property
    def token_pools(self) -> tuple[SubPool, ...]:
        return tuple(pool for pool in self.sub_pools if not pool.per_request)

    @property
    def state_pool(self) -> SubPool | None:
        return next((pool for pool in self.sub_pools if pool.per_request), None)

    def sink_bytes(self, page_size: int) -> int:
        """Bytes at the arena's start that captured graphs write to: the largest page envelope."""
        return max((pool.page_bytes(page_size) for pool in self.sub_pools), default=0)

    def floor_terms(self, page_size: int, *, context_len: int | None = None) -> list[tuple[str, int]]:
        """Slots of each sub-pool that one request needs to be served at all, as ``bs1_floor_terms``.

        A window is charged whole with a page of slack, as SGLang does; a full-attention request is
        cut to the pool at admission, so it is charged one page, or all of `context_len` if given.
        """
        terms = []
        for pool in self.sub_pools:
            if pool.per_request:
                terms.append((pool.name, 1))
                continue
            tokens = page_size if context_len is None else context_len
            if pool.window is not None:
                whole = pool.window + page_size
                tokens = whole if context_len is None else min(context_len, whole)
            terms.append((pool.name, -(-tokens // page_size) * page_size))
        return terms


def split_layers(layers: int, pp: int, partition: Sequence[int] | None = None) -> list[range]:
    """Layers of each pipeline stage; a remainder goes to the last stages, one each, as in SGLang.

    Raises
    ------
    GeometryError
        More stages than layers, or a partition that does not add up.
    """
    if partition is not None:
        if len(partition) != pp or sum(partition) != layers or min(partition) < 1:
            raise GeometryError(
                f"The partition {','.join(map(str, partition))} does not split {layers} layers "
                f"into {pp} stages.",
                fix=f"Give {pp} positive numbers that add up to {layers}.",
            )
        sizes = list(partition)
    else:
        if pp > layers:
            raise GeometryError(
                f"{layers} layers cannot be split into {pp} pipeline stages.", fix="Choose a smaller --pp."
            )
        base, extra = divmod(layers, pp)
        sizes = [base + (stage >= pp - extra) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stages(
    model: ModelGeometry,
    *,
    tp: int,
    pp: int,
    dtypes: CacheDtypes,
    partition: Sequence[int] | None = None,
) -> list[RankGeometry]:
    """Every pipeline stage's `rank_geometry`."""
    return [
        rank_geometry(model, tp=tp, dtypes=dtypes, layers=layers, stage=stage)
        for stage, layers in enumerate(split_layers(len(model.layers), pp, partition))
    ]


def rank_geometry(
    model: ModelGeometry, *, tp: int, dtypes: CacheDtypes, layers: range | None = None, stage: int = 0
) -> RankGeometry:
    """The sub-pools of one tensor-parallel rank, all of which are alike.

    Raises
    ------
    GeometryError
        Heads or channels that cannot be placed on `tp` ranks.
    """
    layers = range(len(model.layers)) if layers is None else layers
    chosen = [(index, model.layers[index]) for index in layers]
    pools: list[SubPool] = []
    states = [(index, layer) for index, layer in chosen if layer.state is not None]
    if states:
        pools.append(_state_pool(states, tp, dtypes))
    for span, kind in ((Span.SLIDING, "swa"), (Span.CHUNKED, "chunked")):
        of_span = [(i, layer) for i, layer in chosen if layer.row is not None and layer.span is span]
        windows = sorted({layer.window for _, layer in of_span if layer.window is not None})
        for window in windows:
            members = [(i, layer) for i, layer in of_span if layer.window == window]
            name = kind if len(windows) == 1 else f"{kind}-{window}"
            pools.append(_row_pool(name, kind, members, tp, dtypes, window=window))
    indexed = [(i, layer) for i, layer in chosen if layer.index is not None]
    if indexed:
        sizes = tuple(layer.index.nbytes for _, layer in indexed if layer.index is not None)
        pools.append(SubPool("indexer", "indexer", tuple(i for i, _ in indexed), sizes))
    full = [(i, layer) for i, layer in chosen if layer.row is not None and layer.span is Span.FULL]
    if full:
        pools.append(_row_pool("full", "full", full, tp, dtypes))
    # A convolution with a kernel of 1 keeps nothing.
    kept = tuple(pool for pool in pools if pool.entry_bytes)
    return RankGeometry(stage=stage, tp=tp, layers=layers, sub_pools=kept)


def with_drafts(rank: RankGeometry, layers: int) -> RankGeometry:
    """A rank that keeps the KV of draft layers, too, each like its last full-attention layer's.

    Raises
    ------
    GeometryError
        It has no full-attention layer.
    """
    full = rank.get("full")
    if full is None:
        raise GeometryError(
            "Draft layers are counted like full-attention layers, and there are none.",
            fix="Leave --draft-layers out.",
        )
    after = rank.layers.stop
    longer = replace(
        full,
        layers=(*full.layers, *range(after, after + layers)),
        layer_bytes=(*full.layer_bytes, *full.layer_bytes[-1:] * layers),
    )
    return replace(rank, sub_pools=tuple(longer if pool is full else pool for pool in rank.sub_pools))


def _row_pool(
    name: str,
    kind: str,
    members: Iterable[tuple[int, LayerCache]],
    tp: int,
    dtypes: CacheDtypes,
    window: int | None = None,
) -> SubPool:
    members = list(members)
    rows = [layer.row for _, layer in members if layer.row is not None]
    return SubPool(
        name=name,
        kind=kind,
        layers=tuple(index for index, _ in members),
        layer_bytes=tuple(_row_bytes(row, tp, dtypes.kv) for row in rows),
        window=window,
        row=_on_rank(rows[0], tp) if len(set(rows)) == 1 else None,
    )


def _row_bytes(row: KVRow | MLARow, tp: int, kv: str) -> int:
    if isinstance(row, MLARow) and row.fp8_scaled and kv in ("fp8", "fp8_e4m3"):
        return row.scaled_bytes()
    if kv == FP4:
        return row.elements(tp) // 2 + row.elements(tp) // 16
    return row.elements(tp) * DTYPE_BYTES[kv]


def _on_rank(row: KVRow | MLARow, tp: int) -> KVRow | MLARow:
    if isinstance(row, MLARow):
        return row
    return KVRow(heads_per_rank(row.kv_heads, tp), row.head_dim, row.v_head_dim)


def _state_pool(members: Sequence[tuple[int, LayerCache]], tp: int, dtypes: CacheDtypes) -> SubPool:
    conv, temporal = DTYPE_BYTES[dtypes.conv], DTYPE_BYTES[dtypes.temporal]
    sizes = tuple(
        layer.state.conv_elements(tp) * conv + layer.state.temporal_elements(tp) * temporal
        for _, layer in members
        if layer.state is not None
    )
    return SubPool("mamba", "mamba", tuple(i for i, _ in members), sizes, per_request=True)
