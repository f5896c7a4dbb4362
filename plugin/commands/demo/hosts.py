"""Two hosts on one machine: network namespaces joined by a cable that can be cut."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.worker import Role

__all__ = ["HostsError", "HostsReport", "TwoHosts"]

_ADDRESSES: Final[dict[Role, str]] = {"prefill": "10.203.77.1", "decode": "10.203.77.2"}
"""A private range; nobody outside the two namespaces sees it."""
_PREFIX_BITS: Final = 30
_LINK: Final = "kvarena0"
_NAME: Final = re.compile(r"kvarena-(\d+)-(?:prefill|decode)")
_COMMAND_S: Final = 10.0


class HostsError(KvArenaError):
    """Two hosts cannot be set up here; nothing is left of them."""


class HostsReport(msgspec.Struct, frozen=True):
    """Where the pair ran, and how it took the loss of the link."""

    addresses: dict[str, str]
    """Of each role, in a network of its own."""
    cut_s: float
    """How long the link was down; 0: it was never cut."""
    moved_before: int
    """Prompts whose pages had been moved when it was cut."""
    moved_after: int
    """Those that were moved later."""
    resent: int
    """Prompts that were written again, because a transfer had failed."""


class TwoHosts:
    """A namespace for each of the pair, and a veth pair between them, as long as the block lasts.

    Parameters
    ----------
    cut_s : float
        How long the link is down, once, after the first prompt has moved; 0: never.

    Raises
    ------
    HostsError
        Not root, no iproute2, or no permission.
    """

    def __init__(self, *, cut_s: float = 1.0) -> None:
        if os.geteuid() != 0:
            raise HostsError("--hosts 2 makes network namespaces, which needs root.", fix="Run it as root.")
        if shutil.which("ip") is None:
            raise HostsError("--hosts 2 needs the command ip.", fix="apt-get install iproute2")
        self.names: dict[Role, str] = {role: f"kvarena-{os.getpid()}-{role}" for role in _ADDRESSES}
        self._cut_s = cut_s
        self._cut_at: float | None = None
        self._down_s = 0.0
        self._is_down = False
        self._moved = [0, 0]

    def __enter__(self) -> TwoHosts:
        try:
            self._remove_stale()
            for name in self.names.values():
                _ip("netns", "add", name)
            here, there = self.names.values()
            _ip("link", "add", _LINK, "netns", here, "type", "veth", "peer", "name", _LINK, "netns", there)
            for role, name in self.names.items():
                _ip("-n", name, "address", "add", f"{_ADDRESSES[role]}/{_PREFIX_BITS}", "dev", _LINK)
                for link in ("lo", _LINK):
                    _ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self._remove(self.names.values())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self._remove(self.names.values())
        if left and error is None:
            raise HostsError(
                f"these network namespaces could not be removed: {', '.join(left)}.",
                fix="ip netns delete NAME",
            )

    def address(self, role: Role) -> str:
        """Where a role's host is reached by the other."""
        return _ADDRESSES[role]

    def prefix(self, role: Role) -> Sequence[str]:
        """What a command needs before it to run on a role's host; the reference runs outside."""
        return ("ip", "netns", "exec", self.names[role]) if role in self.names else ()

    def take(self, message: control.Message) -> None:
        """Follow what the prefill worker says: its first prompt has moved, so others are on their way."""
        if not isinstance(message, control.Progress) or not message.moved:
            return
        self._moved[self._cut_at is not None] += 1
        if self._cut_at is None and self._cut_s:
            self._cut_at = time.monotonic()
            self._set_link("down")

    def tick(self) -> None:
        """Mend the link when it has been down for long enough; to be called often."""
        if self._is_down and self._cut_at is not None and time.monotonic() - self._cut_at >= self._cut_s:
            self._set_link("up")
            self._down_s = time.monotonic() - self._cut_at

    def report(self, *, resent: int) -> HostsReport:
        """How long the link was down, and what was sent again."""
        down_s = self._down_s
        if self._is_down and self._cut_at is not None:
            down_s = time.monotonic() - self._cut_at
        return HostsReport(
            addresses={str(role): address for role, address in _ADDRESSES.items()},
            cut_s=down_s,
            moved_before=self._moved[0],
            moved_after=self._moved[1],
            resent=resent,
        )

    def _set_link(self, state: str) -> None:
        # One end is enough: the other loses its carrier.
        _ip("-n", self.names["prefill"], "link", "set", _LINK, state)
        self._is_down = state == "down"

    @staticmethod
    def _remove(names: Iterable[str]) -> list[str]:
        """Delete namespaces, and with them what is in them; returns those that stay."""
        wanted = set(names) & set(_namespaces())
        for name in wanted:
            try:
                _ip("netns", "delete", name)
            except HostsError:
                continue
        return sorted(wanted & set(_namespaces()))

    def _remove_stale(self) -> None:
        """Namespaces of a run that was killed before it could clean up."""
        for name in _namespaces():
            owner = _NAME.fullmatch(name)
            if owner is not None and not os.path.exists(f"/proc/{owner[1]}"):
                self._remove([name])


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _ip(*arguments: str) -> str:
    """Run ``ip``; out of reach of Ctrl-C, which would leave half of its work."""
    try:
        done = subprocess.run(
            ["ip", *arguments],
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostsError(f"ip {' '.join(arguments)} did not end within {_COMMAND_S:g} s.") from error
    if done.returncode:
        raise HostsError(
            f"ip {' '.join(arguments)} failed: {done.stderr.strip() or done.returncode}.",
            fix="Network namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN, in a container too.",
        )
    return done.stdout
