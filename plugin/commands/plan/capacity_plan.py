"""A capacity plan: what a model keeps, and how much of it fits a card before and after capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarena.plugin.byte_sizes import MIB, format_bytes
from kvarena.plugin.commands.plan.capacity import (
    Capacity,
    Split,
    capacity,
    floor_bytes,
    max_slots,
    requests_of,
)
from kvarena.plugin.commands.plan.errors import DoesNotFitError, PlanError
from kvarena.plugin.commands.plan.geometry import MLARow, ModelGeometry
from kvarena.plugin.commands.plan.moved import Moved, moved_bytes
from kvarena.plugin.commands.plan.ranks import (
    DTYPE_BYTES,
    CacheDtypes,
    RankGeometry,
    stages,
    with_drafts,
)
from kvarena.plugin.commands.plan.sglang_gain import Verdict, judge
from kvarena.plugin.commands.plan.sglang_reserve import (
    Reserve,
    ServerShape,
    graph_reserve_mib,
    release,
    reserve_after,
    reserve_before,
)
from kvarena.plugin.commands.plan.text import printable
from kvarena.plugin.commands.plan.weights import WeightEstimate

__all__ = ["RUNTIME_BYTES", "CapacityPlan", "Gpu", "PlanRequest", "Sizing", "choose_dtypes", "make_plan"]

#: What an H200 with SGLang 0.5.23 and torch 2.14 had taken before the model was loaded: 143771 MiB
#: on the label, 139.07 GiB free (the driver's own part, a context, libraries).
RUNTIME_BYTES = 1362 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card of the server and what else lives on it. Sizes are bytes per card."""

    total_bytes: int
    runtime_bytes: int = RUNTIME_BYTES
    weights_bytes: int | None = None
    graph_bytes: int | None = None
    activation_bytes: int = 0
    mem_fraction_static: float | None = None
    sglang: str = "0.5.23"
    server: ServerShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked: a layout, and a card or a pool of given size.

    `sglang` is the release whose layers the model's geometry counts; ``None`` for the architecture alone.
    `hybrid_window` says that there the window layers have a pool of their own.
    """

    tp: int = 1
    pp: int = 1
    partition: Sequence[int] | None = None
    page_size: int = 1
    dtypes: CacheDtypes = field(default_factory=CacheDtypes)
    split: Split = field(default_factory=Split)
    context_len: int | None = None
    card: Gpu | None = None
    pool_bytes: int | None = None
    sglang: str | None = None
    hybrid_window: bool = False
    dp: int = 1
    draft_layers: int = 0
    bandwidth: int | None = None

    @property
    def attention_tp(self) -> int:
        """Ranks that share one token's heads: with attention data parallelism, those of one group."""
        return self.tp // self.dp


@dataclass(frozen=True, slots=True)
class Sizing:
    """One way to size the pool, and what comes out.

    Parameters
    ----------
    name : str
        ``before_capture``, ``after_capture`` or ``pool``.
    pool_bytes : tuple of int
        Bytes of the pool on a rank of each stage; 0 or less where nothing is left.
    capacity : Capacity
        What fits.
    requests : int
        Requests of the plan's context length side by side.
    mem_fraction_static : float or None
        The share of the card that SGLang allows for weights and cache.
    kept_back : tuple
        ``(name, bytes)`` of what is not given to weights and cache.
    most_slots : tuple
        On each stage, slots of each sub-pool when the others are empty.
    serves_one : bool
        Whether every stage's pool has at least the floor for one request.
    """

    name: str
    pool_bytes: tuple[int, ...]
    capacity: Capacity
    requests: int
    mem_fraction_static: float | None = None
    kept_back: tuple[tuple[str, int], ...] = ()
    max_slots: tuple[tuple[tuple[str, int], ...], ...] = ()
    serves_one: bool = True

    @property
    def fits(self) -> bool:
        return self.serves_one and self.capacity.tokens != 0 and self.capacity.states != 0


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A plan, ready to be shown.

    `verdict` says who sizes the pool after capture in SGLang; ``None`` for the architecture alone.
    `problem` is why nothing could be sized on the card, though the geometry is known.
    """

    model: ModelGeometry
    request: PlanRequest
    ranks: tuple[RankGeometry, ...]
    context_len: int
    weights_bytes: tuple[int, ...] | None
    sizings: tuple[Sizing, ...]
    notes: tuple[str, ...]
    verdict: Verdict | None = None
    problem: PlanError | None = None
    moved: Moved | None = None

    @property
    def fits(self) -> bool:
        """Whether the best that can be made of it holds a request: sized after capture, if it can be."""
        return all(sizing.fits for sizing in self.sizings[-1:])

    def sizing(self, name: str) -> Sizing | None:
        return next((sizing for sizing in self.sizings if sizing.name == name), None)

    def floor_bytes(self, rank: RankGeometry, *, context_len: int | None = None) -> int:
        return floor_bytes(rank, self.request.page_size, context_len=context_len)


def choose_dtypes(model: ModelGeometry, kv: str, conv: str, temporal: str) -> tuple[CacheDtypes, list[str]]:
    """Dtypes of the caches, where ``auto`` follows the model's file; and what was assumed."""
    notes = []
    if kv == "auto" and model.kv_dtype is not None:
        kv = model.kv_dtype
        notes.append(
            f"quantization_config has scales for a KV cache in {kv}, and an engine's auto takes it: "
            "--kv-cache-dtype bfloat16 keeps 16 bits."
        )
    elif kv == "auto":
        kv = model.dtype or ""
        if not kv:
            notes.append("No dtype is given: the KV cache is counted in bfloat16.")
        elif DTYPE_BYTES.get(kv) != 2:
            named = printable(kv, 40)
            notes.append(f"The file's dtype is {named}: engines serve it, and keep its KV, in 16 bits.")
        if DTYPE_BYTES.get(kv) != 2:
            kv = "bfloat16"
    if any(isinstance(layer.row, MLARow) and layer.row.fp8_scaled for layer in model.layers):
        notes.append(
            "fp8 rows of sparse attention keep scales and a 16-bit rope part, except in SGLang's trtllm and "
            "tilelang backends."
            if kv.startswith("fp8")
            else "SGLang's auto keeps the KV of sparse attention in fp8_e4m3 on Blackwell: --kv-cache-dtype."
        )
    if temporal == "auto":
        temporal = model.state_dtype or ""
        if temporal not in DTYPE_BYTES:
            if model.recurrent:
                said = f"{temporal[:40]!r} in the file is not known" if temporal else "none is given"
                notes.append(f"Recurrent states are counted in float32 ({said}; SGLang's default).")
            temporal = "float32"
    return CacheDtypes(kv=kv, conv="bfloat16" if conv == "auto" else conv, temporal=temporal), notes


def make_plan(
    model: ModelGeometry,
    request: PlanRequest,
    *,
    estimate: WeightEstimate | None = None,
    notes: Sequence[str] = (),
) -> CapacityPlan:
    """Plan a model.

    Parameters
    ----------
    estimate : WeightEstimate, optional
        The weights by layer, to share them out between stages, and for their size where the card
        names none.
    notes : sequence of str
        What the caller has assumed so far.

    Raises
    ------
    GeometryError
        Heads, channels or layers that do not split as asked.
    """
    said = [*model.notes, *notes]
    if request.tp % request.dp:
        raise PlanError(
            f"--dp-attention {request.dp} does not divide --tp {request.tp}.",
            fix="Give a number of groups that does.",
        )
    tp = request.attention_tp
    ranks = stages(model, tp=tp, pp=request.pp, dtypes=request.dtypes, partition=request.partition)
    if request.draft_layers:
        ranks[-1] = with_drafts(ranks[-1], request.draft_layers)
        said.append(
            f"{request.draft_layers} draft layers keep rows like the last full-attention layer's, as SGLang "
            "counts EAGLE and MTP drafts; their weights are not in the estimate."
        )
    if request.dp > 1:
        said.append(
            f"Attention runs in {request.dp} groups of {tp} ranks: tokens and requests are of one group, "
            "which holds all of the attention's weights."
        )
    if model.attention_heads and model.attention_heads % tp and not model.mla:
        said.append(
            f"{model.attention_heads} attention heads are not a multiple of tp {tp}: an engine may refuse."
        )
    context = request.context_len or min(model.context_len or 8192, 8192)
    weights: tuple[int, ...] | None = None
    sizings: list[Sizing] = []
    verdict: Verdict | None = None
    problem: PlanError | None = None
    if request.sglang is not None:
        server = (request.card and request.card.server) or ServerShape(0, request.tp, request.pp, model.mla)
        verdict = judge(
            model,
            server,
            request.sglang,
            hybrid_window=request.hybrid_window,
            kv_dtype=request.dtypes.kv,
            drafts=request.draft_layers > 0,
        )
    if request.pool_bytes is not None:
        sizings.append(_sized("pool", [request.pool_bytes] * len(ranks), ranks, request, context))
    elif request.card is not None:
        try:
            weights = _weights(request, request.card, ranks, estimate, said)
            sizings = _card_sizings(model, request, request.card, ranks, weights, context, said)
        except PlanError as error:
            problem = error
        if verdict is not None and verdict.by is None:
            sizings = [sizing for sizing in sizings if sizing.name != "after_capture"]
    if model.recurrent and request.split.running_requests is None and sizings:
        said.append(
            "The number of running requests is not given: states and tokens share by SGLang's memory ratio."
        )
    return CapacityPlan(
        model,
        request,
        tuple(ranks),
        context,
        weights,
        tuple(sizings),
        tuple(dict.fromkeys(said)),
        verdict,
        problem,
        moved_bytes(ranks, context, page_size=request.page_size, tp=tp, bandwidth=request.bandwidth),
    )


def _weights(
    request: PlanRequest,
    card: Gpu,
    ranks: Sequence[RankGeometry],
    estimate: WeightEstimate | None,
    said: list[str],
) -> tuple[int, ...]:
    """Bytes of weights on a card of each stage."""
    if card.weights_bytes is None:
        if estimate is None:
            raise PlanError(
                "The size of the weights is not known, so nothing is sized.",
                fix="Give --weights (of the whole model, as on disk).",
            )
        said.append(
            f"Weights are estimated: {estimate.parameters / 1e9:,.2f} billion parameters, {estimate.bits}, "
            f"{format_bytes(estimate.total)} altogether, {format_bytes(estimate.low)} to "
            f"{format_bytes(estimate.high)} with what an estimate leaves out: --weights."
        )
    shares = [_share(rank, ranks, estimate) for rank in ranks]
    total = estimate.total if card.weights_bytes is None and estimate is not None else card.weights_bytes or 0
    # Groups of attention data parallelism hold all of the attention each; the rest is split over all ranks.
    attention = estimate.attention / estimate.total if estimate is not None and estimate.total else 0.0
    each = attention / request.attention_tp + (1 - attention) / request.tp
    return tuple(int(total * share * each) for share in shares)


def _share(rank: RankGeometry, ranks: Sequence[RankGeometry], estimate: WeightEstimate | None) -> float:
    if estimate is not None and (whole := estimate.total) > 0:
        return estimate.stage(rank.layers) / whole
    return len(rank.layers) / sum(len(other.layers) for other in ranks)


def _card_sizings(
    model: ModelGeometry,
    request: PlanRequest,
    card: Gpu,
    ranks: Sequence[RankGeometry],
    weights: Sequence[int],
    context: int,
    said: list[str],
) -> list[Sizing]:
    rel = release(card.sglang)
    server = card.server or ServerShape(card.total_bytes // MIB, request.tp, request.pp, model.mla)
    free = card.total_bytes - card.runtime_bytes
    if free <= max(weights):
        raise DoesNotFitError(
            f"The weights take {format_bytes(max(weights))} of a card with {format_bytes(max(free, 0))} "
            "free.",
            fix="Raise --tp or --pp, or choose a larger card.",
        )
    graphs = card.graph_bytes
    if graphs is None:
        graphs = int(graph_reserve_mib(server, rel) * MIB)
        said.append(
            f"Graphs are counted at SGLang's own guess, {format_bytes(graphs)}: give --graph-memory and "
            "--activation-memory from a server's log for a figure of your own."
        )
    before, after = _reserves(card, server, rel.name)
    measured = graphs + card.activation_bytes
    sizings = []
    for name, reserve, taken in (("before_capture", before, 0), ("after_capture", after, measured)):
        static = int(free * reserve.mem_fraction_static)
        budgets = [static - held - taken for held in weights]
        kept = [(term, int(size * MIB)) for term, size in reserve.terms]
        if taken:
            kept.append(("graphs, activations", taken))
        sizings.append(_sized(name, budgets, ranks, request, context, reserve.mem_fraction_static, kept))
    if card.mem_fraction_static is not None:
        said.append(
            "A given mem_fraction_static keeps as much back after capture as before: leave it out to gain."
        )
    return sizings


def _reserves(card: Gpu, server: ServerShape, name: str) -> tuple[Reserve, Reserve]:
    if card.mem_fraction_static is not None:
        kept = (("mem_fraction_static", (1 - card.mem_fraction_static) * server.gpu_mib),)
        given = Reserve(kept, card.mem_fraction_static)
        return given, given
    rel = release(name)
    return reserve_before(server, rel), reserve_after(server, rel)


def _sized(
    name: str,
    budgets: Sequence[int],
    ranks: Sequence[RankGeometry],
    request: PlanRequest,
    context: int,
    fraction: float | None = None,
    kept: Sequence[tuple[str, int]] = (),
) -> Sizing:
    budgets = tuple(max(budget, 0) for budget in budgets)
    found = capacity(ranks, budgets, page_size=request.page_size, split=request.split)
    requests = requests_of(ranks, found, context, page_size=request.page_size)
    return Sizing(
        name=name,
        pool_bytes=budgets,
        capacity=found,
        requests=requests,
        mem_fraction_static=fraction,
        kept_back=tuple(kept),
        max_slots=tuple(
            tuple(max_slots(rank, budget, request.page_size).items())
            for rank, budget in zip(ranks, budgets, strict=True)
        ),
        serves_one=all(
            floor_bytes(rank, request.page_size) <= budget
            for rank, budget in zip(ranks, budgets, strict=True)
        ),
    )
