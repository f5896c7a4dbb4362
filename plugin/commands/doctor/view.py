"""The doctor's findings on a terminal: one screen, what is wrong with what to do about it."""

from __future__ import annotations

from typing import Final

from kvarena.plugin.commands.doctor.findings import Finding, Report
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["show"]

_MARKS: Final = {
    "ok": ("✓", "green"),
    "note": ("·", "dim"),
    "warning": ("!", "yellow"),
    "refused": ("✗", "red"),
    "broken": ("✗", "bold red"),
}
_VERDICTS: Final = {
    "ready": ("ready", "bold green"),
    "refused": ("refused: the engine would run with its own pool, sized before capture", "bold yellow"),
    "broken": ("broken", "bold red"),
}


def show(report: Report) -> None:
    """Print the findings, then the verdict."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last = ""
    for each in report.findings:
        table.add_row("" if each.topic == last else each.topic, Text(*_MARKS[each.verdict]), _text(each))
        last = each.topic
    console.print(table)
    words, style = _VERDICTS[report.verdict]
    wrong = sum(each.verdict in ("broken", "refused") for each in report.findings)
    warnings = sum(each.verdict == "warning" for each in report.findings)
    counts = [_count(wrong, "reason")] * bool(wrong) + [_count(warnings, "warning")] * bool(warnings)
    console.print(Text.assemble((words, style), f" ({', '.join(counts)})" if counts else ""))


def _text(finding: Finding) -> Text:
    text = Text(finding.what, "" if finding.verdict != "note" else "dim")
    if finding.fix:
        text.append(f"\n→ {finding.fix}", "cyan")
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
