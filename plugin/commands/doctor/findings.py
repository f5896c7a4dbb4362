"""What the doctor found, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

__all__ = ["EXIT_BROKEN", "EXIT_READY", "EXIT_REFUSED", "Finding", "Report", "Verdict"]

EXIT_READY: Final = 0
EXIT_REFUSED: Final = 1
EXIT_BROKEN: Final = 2

Verdict = Literal["ok", "note", "warning", "refused", "broken"]
_STATUS: Final = {"broken": EXIT_BROKEN, "refused": EXIT_REFUSED}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    topic: str
    """``"device"``, ``"driver"``, ``"transfer"``, ``"sglang"``, ``"configuration"``, ``"settings"``."""
    verdict: Verdict
    what: str
    fix: str = ""
    """What to set, install or change; empty where nothing is wrong."""
    data: dict[str, Any] = {}
    """The figures, for programs."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found."""

    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Report:
        """From findings in the order in which they are shown."""
        return cls(findings=tuple(findings))

    @property
    def exit_status(self) -> int:
        """0 ready, 1 refused: SGLang or the engine would run with its own pool, 2 broken."""
        return max((_STATUS.get(each.verdict, EXIT_READY) for each in self.findings), default=EXIT_READY)

    @property
    def verdict(self) -> str:
        """In one word."""
        return ("ready", "refused", "broken")[self.exit_status]
