"""What a person sees of a demo run: progress while it works, then tables and the verdict."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from kvarena.plugin.demo_verdict import DemoReport
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.worker import ROLES, Role
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["DemoConsole"]

_STAGES = {"finalized": "backed"}
"""Events of the timeline that the demo calls otherwise."""


class DemoConsole:
    """Prints a run.

    Parameters
    ----------
    quiet : bool
        Print nothing at all (the report goes elsewhere).
    requests : int
        How many answers are to come from each side.
    """

    def __init__(self, *, quiet: bool, requests: int) -> None:
        self._out = Console(quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description:9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
            console=Console(stderr=True, quiet=quiet),
            transient=True,
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
            moved = role == "prefill" and "pages moved" in message.what
            self._progress.update(task, what=escape(message.what), advance=1 if moved else 0)
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
        for role, pool in report.processes.items():
            if "timeline" in pool:
                self._out.print(_timeline(role, pool))
        self._out.print(_requests(report))
        for problem in report.problems:
            self._out.print(f"[red]{escape(problem)}[/red]", highlight=False)
        self._out.print(_verdict(report), highlight=False)


def _timeline(role: str, pool: dict[str, Any]) -> Table:
    table = Table(title=f"{role}: a pool of {pool['capacity_tokens']} tokens", title_justify="left")
    for name, justify in (("stage", "left"), ("bytes", "right"), ("address", "right"), ("ms", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("")
    for event in pool["timeline"]:
        details = " ".join(f"{key}={value}" for key, value in event["details"].items() if value is not None)
        table.add_row(
            _STAGES.get(event["name"], event["name"]),
            "" if event["nbytes"] is None else f"{event['nbytes']:,}",
            "" if event["address"] is None else f"{event['address']:#x}",
            f"{event['milliseconds']:.2f}" if event["milliseconds"] else "",
            escape(details),
        )
    return table


def _requests(report: DemoReport) -> Table:
    table = Table(title="requests", title_justify="left")
    for name in ("request", "prompt tokens", "new tokens"):
        table.add_column(name, justify="right")
    for name in ("tokens equal", "answer"):
        table.add_column(name)
    for request in report.requests:
        # What is no byte ends a sequence; untrained weights say no words, so the bytes are shown as such.
        answer = ascii(bytes(token for token in request.tokens if token < 256))[2:-1]
        table.add_row(
            str(request.rid),
            str(request.prompt_tokens),
            str(len(request.tokens)),
            "[green]yes[/green]" if request.equal else "[red]no[/red]",
            escape(request.error or (answer if len(answer) <= 48 else answer[:45] + "...")),
        )
    return table


def _verdict(report: DemoReport) -> str:
    if not report.ok:
        return f"[bold red]failed[/bold red]: {len(report.problems)} problems, in {report.seconds:.1f} s"
    margin = "" if report.least_margin is None else f"{report.least_margin:.1e}"
    noise = "" if report.largest_noise is None else f"{report.largest_noise:.1e}"
    tokens = sum(len(request.tokens) for request in report.requests)
    return (
        f"[bold green]equal[/bold green]: all {tokens} tokens of {len(report.requests)} requests are those "
        "of a single process with an eager pool; no address moved, nothing is registered beyond what is "
        f"backed, every page is free again. Closest choice {margin} apart, rounding {noise}. "
        f"{report.seconds:.1f} s."
    )
