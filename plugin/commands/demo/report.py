"""What a person sees of a demo run: progress while it works, then tables and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvarena.plugin.commands.demo.growth import GrowthReport
from kvarena.plugin.commands.demo.hosts import HostsReport
from kvarena.plugin.commands.demo.verdict import DemoReport
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.worker import ROLES, Role
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["DemoConsole"]

_STAGES = {"finalized": "backed", "shrunk": "given back"}
"""Events of the timeline that the demo calls otherwise."""


class DemoConsole:
    """Prints a run.

    Parameters
    ----------
    quiet : bool
        Print nothing at all (the report goes elsewhere).
    requests : int
        How many answers are to come from each side.
    progress : bool
        Whether to show bars while it works; they would mix with log lines.
    """

    def __init__(self, *, quiet: bool, requests: int, progress: bool = True) -> None:
        self._out = Console(quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description:9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
            console=Console(stderr=True, quiet=quiet),
            transient=True,
            disable=not progress,
        )
        self._tasks: dict[Role, TaskID] = {}
        for role in ROLES:
            self._tasks[role] = self._progress.add_task(role, total=requests, what="starting")

    def __enter__(self) -> DemoConsole:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def event(self, role: Role, message: control.Message) -> None:
        """Show a worker's message."""
        task = self._tasks[role]
        if isinstance(message, control.Online):
            self._progress.update(task, what=f"process {message.pid}: importing torch")
        elif isinstance(message, control.Progress):
            self._progress.update(task, what=escape(message.what), advance=int(message.moved))
        elif isinstance(message, control.Ready):
            self._progress.update(task, what="ready")
        elif isinstance(message, control.Finished):
            result = message.result
            what = f"request {result.rid}: {result.error or f'{len(result.tokens)} tokens'}"
            self._progress.update(task, what=escape(what), advance=1)
        elif isinstance(message, control.Stopped):
            self._progress.update(task, what=escape(message.error) or "ended")

    def report(self, report: DemoReport) -> None:
        """Print the tables and the verdict."""
        self._progress.stop()
        pools = {role: pool for role, pool in report.processes.items() if "timeline" in pool}
        pair = {role: pool for role, pool in pools.items() if role != "reference"}
        stages = [[event["name"] for event in pool["timeline"]] for pool in pair.values()]
        # The two go the same way, if nothing went wrong: one table then shows both.
        for part in [pair] if stages[1:] == stages[:1] else [{role: pool} for role, pool in pair.items()]:
            if part:
                self._out.print(_timeline(part))
        self._out.print()
        self._out.print(_requests(report))
        self._out.print()
        if report.growth is not None:
            self._out.print(_growth(report.growth), highlight=False)
        if report.hosts is not None:
            self._out.print(_hosts(report.hosts), highlight=False)
        for problem in report.problems:
            self._out.print(f"[red]{escape(problem)}[/red]", highlight=False)
        self._out.print(_verdict(report), highlight=False)


def _timeline(pools: dict[str, dict[str, Any]]) -> Table:
    """The life of pools that went through the same stages, side by side."""
    title = ", ".join(f"{role} for {pool['capacity_tokens']} tokens" for role, pool in pools.items())
    table = _plain_table(title=f"pools in bytes: {title}", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for role in pools:
        table.add_column(role, justify="right", no_wrap=True)
        table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("")
    timelines = [pool["timeline"] for pool in pools.values()]
    bases = [next((e["address"] for e in events if e["address"] is not None), 0) for events in timelines]
    # All stages are about memory at the address that was reserved: it is shown once.
    table.add_row("address", *(cell for base in bases for cell in (f"{base:#x}", "")))
    for events in zip(*timelines, strict=True):
        cells = []
        for event, base in zip(events, bases, strict=True):
            elsewhere = event["address"] not in (None, base)
            nbytes = "" if event["nbytes"] is None else f"{event['nbytes']:,}"
            cells += [
                f"{nbytes} at {event['address']:#x}" if elsewhere else nbytes,
                f"{event['milliseconds']:.2f}" if event["milliseconds"] else "",
            ]
        name = events[0]["name"]
        table.add_row(_STAGES.get(name, name), *cells, escape(_detail(name, events[0]["details"])))
    return table


def _detail(name: str, details: dict[str, Any]) -> str:
    """What is worth knowing of a stage beside bytes and time."""
    if name == "registered":
        return f"{details['regions']} region{'s' * (details['regions'] != 1)}, epoch {details['epoch']}"
    if name == "captured":
        return f"{details['steps']} steps, {details['how']}"
    if name == "budget" and details["minus_headroom"]:
        return f"leaves {details['minus_headroom']:,}"
    return str(details.get("reason", ""))


def _requests(report: DemoReport) -> Table:
    table = _plain_table()
    for name in ("request", "prompt tokens", "new", "equal"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("answer")
    for request in report.requests:
        # What is no byte ends a sequence; untrained weights say no words, so the bytes are shown as such.
        answer = ascii(bytes(token for token in request.tokens if token < 256))[2:-1]
        table.add_row(
            str(request.rid),
            str(request.prompt_tokens),
            str(len(request.tokens)),
            "[green]yes[/green]" if request.equal else "[red]no[/red]",
            escape(request.error or (answer if len(answer) <= 32 else answer[:29] + "...")),
        )
    return table


def _plain_table(**options: Any) -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, **options)


def _growth(growth: GrowthReport) -> str:
    return (
        f"growth: {growth.cycles} times each pool grew by {growth.nbytes:,} bytes and gave them back, while "
        f"requests were served ({growth.served_again} of them again); leases and transfers out at those "
        f"moments: {growth.in_flight}, longest wait {growth.waited_ms / 1e3:.1f} s, transfers failed: "
        f"{growth.failed_transfers}."
    )


def _hosts(hosts: HostsReport) -> str:
    where = ", ".join(f"{role} {address}" for role, address in hosts.addresses.items())
    return (
        f"two hosts: {where}; link down once for {hosts.cut_s:.1f} s, prompts moved before it: "
        f"{hosts.moved_before}, after it: {hosts.moved_after}, written again: {hosts.resent}."
    )


def _verdict(report: DemoReport) -> str:
    if not report.ok:
        problems = _count(report.problems, "problem")
        return f"[bold red]failed[/bold red]: {problems}, in {report.seconds:.1f} s"
    margin = "" if report.min_margin is None else f"{report.min_margin:.1e}"
    noise = "" if report.largest_noise is None else f"{report.largest_noise:.1e}"
    tokens = sum(len(request.tokens) for request in report.requests)
    served = _count(report.requests, "request")
    return (
        f"[bold green]equal[/bold green]: all {tokens} tokens of {served} are those of a single process "
        "with an eager pool; no address moved, nothing is registered beyond what is "
        f"backed, every page is free again. Closest choice {margin} apart, rounding {noise}. "
        f"{report.seconds:.1f} s."
    )


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
