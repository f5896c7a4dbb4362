"""Status on a terminal: a block for each process, with a bar of its arena."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvarena.plugin.byte_sizes import format_bytes
from kvarena.plugin.commands.terminal import printable
from kvarena.plugin.observe.status.files import Found
from kvarena.plugin.observe.status.identity import ended_with_its_parent
from kvarena.plugin.observe.status.model import EngineStatus, PoolStatus, ProcessStatus, SubPoolStatus
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

__all__ = ["render", "show", "watch"]

#: Of the sub-pools, in the order along the arena; the picture has the same.
COLOURS: Final = ("dodger_blue1", "orange1", "green3", "magenta")
_STATES: Final = {
    "planned": "nothing is reserved yet",
    "reserved": "reserved, only the sink has memory: before capture",
    "serving": "serving, sized after capture",
    "eager": "serving, sized before capture",
    "closed": "closed",
}
_BAR: Final = 60


def show(found: Sequence[Found], directory: Path, *, pid: int | None = None) -> None:
    """Print it once."""
    Console(highlight=False).print(render(found, directory, pid=pid))


def watch(
    look: Callable[[], list[Found]], directory: Path, seconds: float, *, pid: int | None = None
) -> None:
    """Show it again and again, in place on a terminal and one below the other elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal:
        while True:
            console.print(render(look(), directory, pid=pid))
            time.sleep(seconds)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(
                Group(Text("kvarena status, Ctrl-C to leave\n", "dim"), render(look(), directory, pid=pid)),
                refresh=True,
            )
            time.sleep(seconds)


def render(found: Sequence[Found], directory: Path, *, pid: int | None = None) -> RenderableType:
    """Everything that was found, the living first; `pid`: the only process that was looked for."""
    blocks: list[RenderableType] = []
    for each in found:
        if each.state in ("running", "elsewhere") and each.status is not None:
            blocks += [*_process(each, each.status), Text()]
    for each in found:
        if each.state == "dead" and each.status is not None:
            blocks.append(_dead(each.status))
        elif each.state == "unreadable":
            blocks.append(
                Text(f"{printable(str(each.path))} cannot be read: {printable(each.why)}.", "yellow")
            )
    if not blocks:
        which = "" if pid is None else f" with the number {pid}"
        blocks.append(Text(f"No kvarena process{which} is running (looked in {printable(str(directory))})."))
    return Group(*blocks)


def _dead(status: ProcessStatus) -> Text:
    who = f"{printable(status.name)}, pid {status.identity.pid},"
    if ended_with_its_parent(status.identity):
        return Text(f"{who} has ended with its parent, pid {status.identity.parent_pid}.", "dim")
    return Text(f"{who} has died without closing its pool; its status file is removed.", "yellow")


def _process(found: Found, status: ProcessStatus) -> list[RenderableType]:
    pool = status.pool
    head = Text.assemble(
        (printable(status.name), "bold"), f"  pid {status.identity.pid}  ", _STATES[pool.state]
    )
    if found.state == "elsewhere":
        head.append(f"  in another container or on another host, written {found.age_s:.0f} s ago", "yellow")
    elif found.age_s > 10:
        head.append(f"  silent for {found.age_s:.0f} s", "yellow")
    lines: list[RenderableType] = [head]
    if status.metrics_address is not None:
        lines.append(Text(f"  metrics at http://{printable(status.metrics_address)}/metrics"))
    if status.refusals:
        lines.append(Text(f"  not sized after capture: {printable(', '.join(status.refusals))}", "yellow"))
    if pool.reserved_bytes:
        lines += [_memory(pool), _bar(pool), *(_engine(engine) for engine in pool.engines)]
        if pool.state != "reserved":
            lines.append(_sub_pools(pool))
    return lines


def _memory(pool: PoolStatus) -> Text:
    handles = len(pool.handle_bytes)
    line = (
        f"  {printable(pool.device)}: reserved {format_bytes(pool.reserved_bytes)}, "
        f"backed {format_bytes(pool.backed_bytes)} by {handles} {'handle' if handles == 1 else 'handles'}"
    )
    if pool.tokens and pool.state in ("serving", "eager"):
        line += f", up to {pool.tokens:,} tokens"
        if pool.requests is not None:
            line += f", states of {pool.requests:,} requests"
    if pool.torch_cached_bytes:
        line += f"; torch caches {format_bytes(pool.torch_cached_bytes)}"
    return Text(line)


def _bar(pool: PoolStatus) -> Text:
    """The reservation from its start to its end: pages in use, free memory, addresses without memory."""
    scale = _BAR / max(1, pool.reserved_bytes)
    active = min(_BAR, max(1, round(pool.active_bytes * scale)))
    cells: list[tuple[str, str]] = [("─", "grey50")] * _BAR
    cells[:active] = [("░", "grey70")] * active
    low, high = 0, active
    for index, each in enumerate(pool.sub_pools):
        width = min(high - low, -int(-each.live_bytes * scale // 1)) if each.live_bytes else 0
        cell = ("█", COLOURS[index % len(COLOURS)])
        if each.grow_direction == "down":
            cells[high - width : high] = [cell] * width
            high -= width
        else:
            cells[low : low + width] = [cell] * width
            low += width
    return Text.assemble("  ", *cells)


def _engine(engine: EngineStatus) -> Text:
    regions = len(engine.regions)
    line = (
        f"  {printable(engine.name)}: {format_bytes(engine.registered_bytes)} registered ({regions} "
        f"{'region' if regions == 1 else 'regions'}, epoch {engine.epoch}), {engine.in_flight} in flight, "
        f"{format_bytes(engine.transferred_bytes)} sent"
    )
    return Text.assemble(line, (f", {engine.failures} failed" if engine.failures else "", "red"))


def _sub_pools(pool: PoolStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), header_style="dim")
    table.add_column("sub-pool", no_wrap=True)
    for title in ("page", "pages live", "free", "in use"):
        table.add_column(title, justify="right", no_wrap=True)
    for index, each in enumerate(pool.sub_pools):
        arrow = {"up": "→", "down": "←"}.get(each.grow_direction, "↔")
        table.add_row(
            Text(f"█ {printable(each.name)} {arrow}", COLOURS[index % len(COLOURS)]),
            format_bytes(each.page_bytes),
            *_pages(each),
        )
    return table


def _pages(each: SubPoolStatus) -> tuple[str, str, str]:
    maximum = f"{each.num_pages * each.slots_per_page:,} {each.unit}" if each.num_pages else "-"
    if each.live_pages is None or each.free_pages is None:
        return "-", "-", maximum
    live = each.live_pages * each.slots_per_page
    return f"{each.live_pages:,}", f"{each.free_pages:,}", f"{live:,} of {maximum}"
