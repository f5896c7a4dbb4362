"""A plan as a picture: one card's memory, sized before and after capture."""

from __future__ import annotations

from pathlib import Path

from kvarena.plugin.byte_sizes import GIB
from kvarena.plugin.commands.plan.capacity_plan import CapacityPlan, Sizing
from kvarena.plugin.commands.plan.errors import PlanError
from kvarena.plugin.commands.plan.output import gain, tightest

__all__ = ["plot_plan"]

_COLOURS = {"taken at start": "#9aa5b1", "weights": "#52606d", "kept back": "#e8b44f", "unused": "#f3f4f6"}
_POOL_COLOURS = ("#1f6f8b", "#3aa17e", "#8bc6a2", "#b5a1d6", "#d98f8f")
_TITLES = {"before_capture": "before capture", "after_capture": "after capture", "pool": "as given"}


def plot_plan(plan: CapacityPlan, file: str | Path) -> None:
    """Write the plan's picture.

    Raises
    ------
    PlanError
        Nothing to draw, matplotlib is missing, or the file cannot be written.
    """
    if not plan.sizings:
        raise PlanError("There is nothing to draw.", fix="Give --gpu-memory or --pool-memory.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("matplotlib is not installed.", fix="pip install 'kvarena[plot]'") from error
    figure = Figure(figsize=(9, 1.6 + 0.9 * len(plan.sizings)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    seen: set[str] = set()
    for position, sizing in enumerate(plan.sizings):
        left = 0.0
        for label, nbytes, colour in _segments(plan, sizing):
            width = nbytes / GIB
            axes.barh(
                position,
                width,
                left=left,
                color=colour,
                edgecolor="white",
                height=0.62,
                label=label if label not in seen else "_",
            )
            seen.add(label)
            left += width
        tokens = sizing.capacity.tokens
        caption = f"{tokens:,} tokens" if tokens is not None else f"{sizing.capacity.states or 0:,} requests"
        axes.text(left, position, f"  {caption}", va="center", ha="left", fontsize=10, fontweight="bold")
    axes.set_yticks(range(len(plan.sizings)), [_TITLES[sizing.name] for sizing in plan.sizings])
    axes.invert_yaxis()
    widest = max(sum(nbytes for _, nbytes, _ in _segments(plan, sizing)) for sizing in plan.sizings) / GIB
    axes.set_xlim(0, (widest or 1.0) * 1.25)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= widest])
    axes.set_xlabel("GiB of one card")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    request = plan.request
    title = f"{plan.model.model_type}: tp {request.tp}, pp {request.pp}, KV {request.dtypes.kv}"
    won = gain(plan)
    if won is not None and won["tokens"] is not None and won["percent"] is not None:
        title += f"   {won['tokens']:+,} tokens ({won['percent']:+.1f} %)"
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    try:
        figure.savefig(str(file), dpi=150)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{file} cannot be written: {error}.", fix="Give a path that ends in .png."
        ) from error


def _segments(plan: CapacityPlan, sizing: Sizing) -> list[tuple[str, int, str]]:
    """Pieces of one bar, left to right: what is taken, the pool by kind, what is kept back."""
    rank = tightest(plan)
    index = plan.ranks.index(rank)
    pieces: list[tuple[str, int, str]] = []
    card = plan.request.card
    if card is not None and plan.weights_bytes is not None:
        pieces.append(("taken at start", card.runtime_bytes, _COLOURS["taken at start"]))
        pieces.append(("weights", plan.weights_bytes[index], _COLOURS["weights"]))
    pool_bytes = sizing.pool_bytes[index]
    left = pool_bytes
    slots = {
        "full": sizing.capacity.tokens or 0,
        "indexer": sizing.capacity.tokens or 0,
        "mamba": sizing.capacity.states or 0,
    }
    for pool, colour in zip(rank.sub_pools, _POOL_COLOURS * len(rank.sub_pools), strict=False):
        nbytes = min(slots.get(pool.kind, sizing.capacity.window_tokens or 0) * pool.entry_bytes, left)
        pieces.append((pool.name, nbytes, colour))
        left -= nbytes
    if left > pool_bytes // 200:  # a sliver would only puzzle
        pieces.append(("sink and rest", left, _COLOURS["unused"]))
    if card is not None and plan.weights_bytes is not None:
        kept = card.total_bytes - card.runtime_bytes - plan.weights_bytes[index] - pool_bytes
        pieces.append(("graphs, activations, kept back", max(kept, 0), _COLOURS["kept back"]))
    return pieces
