"""A plan as tables on a terminal."""

from __future__ import annotations

from kvarena.plugin.byte_sizes import format_bytes
from kvarena.plugin.commands.plan.capacity_plan import CapacityPlan, Sizing
from kvarena.plugin.commands.plan.geometry import KVRow, MLARow
from kvarena.plugin.commands.plan.moved import Moved
from kvarena.plugin.commands.plan.output import gain, tightest
from kvarena.plugin.commands.plan.ranks import RankGeometry, SubPool
from kvarena.plugin.commands.plan.sglang_gain import GAINS
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["show"]

_TITLES = {
    "before_capture": "sized before capture",
    "after_capture": "sized after capture",
    "pool": "pool as given",
}


def show(plan: CapacityPlan, console: Console) -> None:
    """Print a plan."""
    console.print(_gains(plan))
    console.print(_head(plan))
    console.print(_sub_pools(plan))
    console.print(_floors(plan))
    if plan.moved is not None:
        console.print(_moved(plan.moved))
    if plan.sizings:
        console.print(_sizings(plan))
        if (line := _gain_line(plan)) is not None:
            console.print(line)
        if not plan.fits:
            short = [_TITLES[sizing.name] for sizing in plan.sizings if not sizing.fits]
            console.print(Text(f"Does not fit: {', '.join(short)}; one request needs the floor.", "bold red"))
    if plan.problem is not None:
        console.print(Text(str(plan.problem), "bold red"))
    if plan.notes:
        console.print(Text("Assumed and noticed:", style="bold"))
        for note in plan.notes:
            console.print(Text(f"  - {note}"))


def _gains(plan: CapacityPlan) -> RenderableType:
    """Which models and flags gain what in which release, and what that means for this one."""
    table = Table(title="What kvarena gains in SGLang today", title_justify="left", title_style="bold")
    for name in ("models", "flags", "SGLang", "gains"):
        table.add_column(name, overflow="fold")
    for row in GAINS:
        table.add_row(*row)
    verdict = plan.verdict
    if verdict is None:
        line = "Engine none: what the architecture alone needs, whatever an engine allocates."
    elif verdict.by == "kvarena":
        line = (
            f"SGLang {plan.request.sglang} allocates this; kvarena sizes it after capture ({verdict.flags})."
        )
    else:
        who = f"SGLang sizes it after capture itself ({verdict.flags})" if verdict.by else "nobody does"
        reasons = "; ".join(verdict.reasons)
        line = f"SGLang {plan.request.sglang} allocates this; kvarena does not size it after capture: "
        line += f"{reasons}. There is no gain from kvarena; {who}."
    return Group(
        table, Text(line, "bold green" if verdict is None or verdict.by == "kvarena" else "bold yellow")
    )


def _head(plan: CapacityPlan) -> Text:
    model, request = plan.model, plan.request
    counts = [f"{count} {kind}" for kind, count in model.layer_counts().items() if count]
    head = Text(model.model_type, style="bold")
    head.append(f"  {len(model.layers)} layers: {', '.join(counts)}", style="default")
    head.append(f"\ntp {request.tp}, pp {request.pp}, page size {request.page_size}, KV {request.dtypes.kv}")
    if model.recurrent:
        head.append(f", states {request.dtypes.temporal} (convolutions {request.dtypes.conv})")
    return head


def _sub_pools(plan: CapacityPlan) -> RenderableType:
    table = Table(title="Sub-pools on one rank", title_justify="left", title_style="bold")
    staged = len(plan.ranks) > 1
    if staged:
        table.add_column("stage", justify="right")
    table.add_column("sub-pool")
    for name in ("layers", "keeps", "bytes per slot", "bytes per page"):
        table.add_column(name, justify="right" if name != "keeps" else "left", no_wrap=name != "keeps")
    for rank in plan.ranks:
        for pool in rank.sub_pools:
            cells = [
                pool.name,
                str(len(pool.layers)),
                _keeps(pool),
                f"{pool.entry_bytes:,} / {'request' if pool.per_request else 'token'}",
                f"{pool.page_bytes(plan.request.page_size):,}",
            ]
            table.add_row(*([str(rank.stage), *cells] if staged else cells))
    return table


def _keeps(pool: SubPool) -> str:
    row = "a state" if pool.per_request else "a key" if pool.kind == "indexer" else "rows of several sizes"
    if isinstance(pool.row, MLARow):
        row = f"latent {pool.row.kv_lora_rank} + rope {pool.row.qk_rope_head_dim}"
    elif isinstance(pool.row, KVRow):
        same = pool.row.head_dim == pool.row.v_head_dim
        size = str(pool.row.head_dim) if same else f"{pool.row.head_dim}/{pool.row.v_head_dim}"
        row = f"{pool.row.kv_heads} KV head{'s' if pool.row.kv_heads > 1 else ''} x {size}"
    return f"{row}, {pool.window:,} tokens" if pool.window is not None else row


def _floors(plan: CapacityPlan) -> RenderableType:
    rank = tightest(plan)
    parts = [
        f"Sink {format_bytes(rank.sink_bytes(plan.request.page_size))}",
        f"floor for one request {format_bytes(plan.floor_bytes(rank))}",
    ]
    if plan.model.context_len is not None:
        whole = plan.floor_bytes(rank, context_len=plan.model.context_len)
        parts.append(f"one request of {plan.model.context_len:,} tokens {format_bytes(whole)}")
    where = f" (stage {rank.stage})" if len(plan.ranks) > 1 else ""
    return Text("; ".join(parts) + where + ".")


def _moved(moved: Moved) -> RenderableType:
    line = (
        f"From prefill to decode, a request of {moved.tokens:,} tokens moves {format_bytes(moved.total)}, "
        f"{format_bytes(max(moved.per_card, default=0))} of them from one card"
    )
    if moved.seconds is not None and moved.bandwidth is not None:
        line += f": {moved.seconds:.3g} s at {format_bytes(moved.bandwidth)}/s"
    return Text(line + ".")


def _sizings(plan: CapacityPlan) -> RenderableType:
    table = Table(title="What fits", title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for sizing in plan.sizings:
        table.add_column(_TITLES[sizing.name], justify="right")
    for label, cells in _rows(plan):
        table.add_row(label, *cells)
    return table


def _rows(plan: CapacityPlan) -> list[tuple[str, list[str]]]:
    sizings = plan.sizings
    rows: list[tuple[str, list[str]]] = []
    rank, index = _shown(plan)
    if plan.request.card is not None and plan.weights_bytes is not None:
        card = plan.request.card
        rows.append(("card", [format_bytes(card.total_bytes)] * len(sizings)))
        rows.append(("  taken at start", [format_bytes(card.runtime_bytes)] * len(sizings)))
        rows.append(("  weights", [format_bytes(plan.weights_bytes[index])] * len(sizings)))
        terms = list(dict.fromkeys(name for sizing in sizings for name, _ in sizing.kept_back))
        for term in terms:
            rows.append((f"  {term}", [_term(sizing, term) for sizing in sizings]))
        rows.append(("mem_fraction_static", [f"{sizing.mem_fraction_static:.3f}" for sizing in sizings]))
    rows.append(("pool", [format_bytes(sizing.pool_bytes[index]) for sizing in sizings]))
    if any(sizing.capacity.tokens is not None for sizing in sizings):
        rows.append(("tokens", [_count(sizing.capacity.tokens) for sizing in sizings]))
    if any(sizing.capacity.window_tokens not in (None, sizing.capacity.tokens) for sizing in sizings):
        rows.append(("window tokens", [_count(sizing.capacity.window_tokens) for sizing in sizings]))
    if rank.state_pool is not None or plan.model.recurrent:
        rows.append(("requests with a state", [_count(sizing.capacity.states) for sizing in sizings]))
    label = f"requests of {plan.context_len:,} tokens"
    rows.append((label, [_count(sizing.requests) for sizing in sizings]))
    return rows


def _shown(plan: CapacityPlan) -> tuple[RankGeometry, int]:
    rank = tightest(plan)
    return rank, plan.ranks.index(rank)


def _term(sizing: Sizing, name: str) -> str:
    return next((format_bytes(size) for term, size in sizing.kept_back if term == name), "-")


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _gain_line(plan: CapacityPlan) -> Text | None:
    found = gain(plan)
    if found is None:
        return None
    parts = [f"{format_bytes(found['bytes'])} per card"]
    if found["tokens"] is not None:
        percent = f" ({found['percent']:+.1f} %)" if found["percent"] is not None else ""
        parts.append(f"{found['tokens']:+,} tokens{percent}")
    parts.append(f"{found['requests']:+,} requests")
    better = found["bytes"] > 0
    label = "Gain" if found["bytes"] > 0 else "No gain"
    if plan.verdict is None:
        label = "An engine that sizes after capture would gain"
    return Text(f"{label}: {', '.join(parts)}.", style="bold green" if better else "bold yellow")
