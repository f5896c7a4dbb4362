"""The arena over time, as a picture: what was reserved, what got memory, who used it, what was registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvarena.errors import KvArenaError
from kvarena.plugin.observe.status.model import ArenaHistory, EventMark, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PictureError", "check_picture", "draw_arena"]

_SUB_POOLS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd")
_NO_MEMORY: Final = "#f3f3f3"
_FREE: Final = "#d9d9d9"
_SINK: Final = "#4d4d4d"
_REGISTERED: Final = "#d62728"
#: Events worth a line, and what they are called there.
_EVENTS: Final = {
    "captured": "captured",
    "finalized": "finalized to",
    "grown": "grown to",
    "shrunk": "given back to",
    "eager": "allocated",
    "closed": "closed",
}


class PictureError(KvArenaError):
    """A picture cannot be drawn; nothing was written."""


def draw_arena(history: ArenaHistory | Sequence[ArenaHistory], path: Path) -> None:
    """Draw one or several arenas, one below the other over the same time.

    Parameters
    ----------
    history : ArenaHistory or sequence of them
        `StatusReporter.history`, or of a status file.
    path : Path
        Its suffix says the format: ``.png``, ``.svg``, ``.pdf``.

    Raises
    ------
    PictureError
        matplotlib is not installed, the format is unknown, the file cannot be written, or there is
        nothing to draw.
    """
    histories = [history] if isinstance(history, ArenaHistory) else list(history)
    histories = [each for each in histories if each.samples]
    if not histories:
        raise PictureError(
            "there is no sample of an arena to draw.", fix="Let the process serve for a second."
        )
    figure = _figure(path, len(histories))
    began = min(each.began_at + each.samples[0].at_s for each in histories)
    ended = max(each.began_at + each.samples[-1].at_s for each in histories)
    panels = figure.subplots(len(histories), 1, sharex=True, squeeze=False)[:, 0]
    for index, (axes, each) in enumerate(zip(panels, histories, strict=True)):
        explained = index > 0 and each.sub_pools == histories[index - 1].sub_pools
        _Panel(axes, each, began, ended).draw(legend=not explained)
    panels[-1].set_xlabel("seconds")
    _save(figure, path)


def check_picture(path: Path) -> None:
    """Refuse early what `draw_arena` would refuse at the end of a long run.

    Raises
    ------
    PictureError
        matplotlib is not installed, the format is unknown, or the folder is not there.
    """
    _figure(path, 1)
    if not path.parent.is_dir():
        raise PictureError(f"there is no folder {path.parent}.", fix="Name a file in an existing folder.")


class _Panel:
    """One arena: addresses upwards, time to the right."""

    def __init__(self, axes: Axes, history: ArenaHistory, began: float, ended: float) -> None:
        self._axes = axes
        self._history = history
        self._end = max(ended - began, 1e-3)
        offset = history.began_at - began
        self._at: Callable[[float], float] = lambda at_s: at_s + offset
        # Steps: a value holds until the next sample; the last until the end of the picture.
        self._samples = history.samples
        last = self._samples[-1]
        closed = last.backed_bytes == 0
        self._times = [self._at(each.at_s) for each in self._samples]
        self._times.append(self._times[-1] if closed else self._end)
        self._unit, self._scale = _unit(history.reserved_bytes)

    def draw(self, *, legend: bool) -> None:
        axes, history = self._axes, self._history
        reserved = history.reserved_bytes * self._scale
        span = (self._times[0], self._times[-1])
        axes.fill_between(span, reserved, color=_NO_MEMORY, label="reserved: addresses only", linewidth=0)
        axes.plot(span, (reserved, reserved), color="#7f7f7f", linewidth=1)
        self._fill(lambda s: 0, lambda s: s.backed_bytes, _FREE, "backed: memory, free")
        self._sub_pools()
        self._fill(lambda s: 0, lambda s: min(history.sink_bytes, s.backed_bytes), _SINK, self._sink())
        self._seams()
        self._registered()
        self._events()
        axes.text(self._end, reserved, " no memory here ", ha="right", va="top", fontsize=8, color="#7f7f7f")
        axes.set_xlim(0, self._end * 1.005)
        axes.set_ylim(0, reserved * 1.04)
        axes.set_ylabel(f"arena, {self._unit}")
        axes.set_title(self._title(), loc="left", fontsize=10, pad=26)
        if legend:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    def _title(self) -> str:
        peak = max(self._samples, key=lambda each: each.backed_bytes)
        handles = _count(peak.handles or len(peak.handle_bytes), "handle")
        return (
            f"{self._history.title}: {self._size(self._history.reserved_bytes)} reserved, "
            f"up to {self._size(peak.backed_bytes)} backed by {handles}, "
            f"up to {self._size(max(each.registered_bytes for each in self._samples))} registered"
        )

    def _sink(self) -> str:
        nbytes = self._history.sink_bytes
        unit, scale = _unit(nbytes)
        return f"sink, {nbytes * scale:.3g} {unit}: all there is before finalize"

    def _sub_pools(self) -> None:
        """Live bytes, each from its end; those that float lie on the one that grows up."""
        below: list[int] = []
        for index, (name, direction) in enumerate(self._history.sub_pools):
            colour = _SUB_POOLS[index % len(_SUB_POOLS)]
            if direction == "down":
                low = partial(self._below_end, index)
                self._fill(low, _active, colour, f"{name}: live, grows down")
                continue
            low = partial(self._above_sink, tuple(below))
            below.append(index)
            high = partial(self._above_sink, tuple(below))
            self._fill(low, high, colour, f"{name}: live, {'grows up' if direction == 'up' else 'floats'}")

    def _above_sink(self, indices: Sequence[int], sample: Sample) -> int:
        sink = min(self._history.sink_bytes, sample.backed_bytes)
        return sink + sum(_live(sample, index) for index in indices)

    def _below_end(self, index: int, sample: Sample) -> int:
        return sample.active_bytes - _live(sample, index)

    def _seams(self) -> None:
        peak = max(len(each.handle_bytes) for each in self._samples)
        for index in range(1, peak):
            heights = [
                sum(each.handle_bytes[:index]) if len(each.handle_bytes) > index else None
                for each in self._samples
            ]
            self._step(
                heights, color="black", linewidth=1, linestyle=":", label=None if index > 1 else "seam"
            )

    def _registered(self) -> None:
        heights = [each.registered_bytes or None for each in self._samples]
        if any(heights):
            self._step(heights, color=_REGISTERED, linewidth=2, label="registered, up to here")

    def _events(self) -> None:
        shown = [event for event in self._history.events if event.name in _EVENTS]
        moments = [(max(0.0, self._at(event.at_s)), self._label(event)) for event in shown]
        # Later than the last sample: it belongs to the next picture.
        labels = [(at, label) for at, label in moments if at <= self._end * 1.005]
        for at, _ in labels:
            self._axes.axvline(at, color="#7f7f7f", linewidth=0.8, linestyle="--")
        _write_labels(self._axes, labels, self._end)

    def _label(self, event: EventMark) -> str:
        text = _EVENTS[event.name]
        # What was captured is steps; the bytes of its event are the sink's.
        if event.nbytes is None or event.name == "captured":
            return text
        return f"{text} {self._size(event.nbytes)}"

    def _size(self, nbytes: int) -> str:
        return f"{nbytes * self._scale:.3g} {self._unit}"

    def _fill(
        self, low: Callable[[Sample], int], high: Callable[[Sample], int], colour: str, label: str
    ) -> None:
        lows = [low(each) * self._scale for each in self._samples]
        highs = [high(each) * self._scale for each in self._samples]
        self._axes.fill_between(
            self._times,
            [*lows, lows[-1]],
            [*highs, highs[-1]],
            step="post",
            color=colour,
            label=label,
            linewidth=0,
        )

    def _step(self, heights: Sequence[int | None], **style: Any) -> None:
        values = [float("nan") if each is None else each * self._scale for each in heights]
        self._axes.step(self._times, [*values, values[-1]], where="post", **style)


def _write_labels(axes: Axes, labels: Sequence[tuple[float, str]], end: float) -> None:
    """Above the axes, in two rows, so that events close to each other stay readable."""
    ends = [float("-inf"), float("-inf")]
    for at, text in labels:
        # A character is about a ninetieth of the width at this size.
        width = end * len(text) / 90
        row = min(range(2), key=lambda each: (at < ends[each], each))
        if at < ends[row]:
            continue
        ends[row] = at + width
        axes.annotate(
            text, (at, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3 + 10 * row),
            textcoords="offset points", fontsize=8, color="#333333",
        )  # fmt: skip


def _active(sample: Sample) -> int:
    return sample.active_bytes


def _live(sample: Sample, index: int) -> int:
    return sample.live_bytes[index] if index < len(sample.live_bytes) else 0


def _unit(nbytes: int) -> tuple[str, float]:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return unit, 1 / size
    return "KiB", 1 / 1024


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _figure(path: Path, panels: int) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError(
            f"matplotlib cannot be loaded ({error}).", fix="Install it: pip install 'kvarena[plot]'."
        ) from error
    figure = Figure(figsize=(11, 0.6 + 3.4 * panels), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise PictureError(
            f"{path} has a suffix that is no known picture format.",
            fix="Use .png, .svg or .pdf.",
        )
    return figure


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise PictureError(
            f"{path} cannot be written: {error.strerror or error}.",
            fix="Name a file in an existing folder.",
        ) from error
