"""An engine that fails on purpose, stacked on a real one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvarena.transfer.errors import RegistrationError, TransferFailed
from kvarena.transfer.protocol import Addresses, Capabilities, Pending, Region, TransferEngine

__all__ = ["FailingEngine"]


class FailingEngine:
    """Passes every call of `TransferEngine` on, but for those that it is told to refuse.

    A refused call never reaches the engine beneath, as if that had refused it and stayed as it was.
    What an engine has beyond that protocol is hidden: one that takes leased pages is given addresses.

    Parameters
    ----------
    engine : TransferEngine
        What it stands on; it answers with that one's name and capabilities.
    fail_at : int or collection of int
        Which calls to refuse, counted from 1 over the operations named by `ops`.
    ops : collection of str
        Of ``"register"``, ``"unregister"``, ``"connect"`` and ``"submit"``.
    code : int or str
        What the engine would have returned.

    Attributes
    ----------
    count : int
        Calls of these operations so far.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        fail_at: int | Collection[int],
        ops: Collection[str] = ("register", "unregister", "connect", "submit"),
        code: int | str = "INJECTED",
    ) -> None:
        self.engine = engine
        self.name = engine.name
        self.fail_at = {fail_at} if isinstance(fail_at, int) else set(fail_at)
        self.ops = frozenset(ops)
        self.code = code
        self.count = 0

    @property
    def capabilities(self) -> Capabilities:
        """Those of the engine beneath."""
        return self.engine.capabilities

    def register(self, regions: Sequence[Region]) -> None:
        """Pass on, or raise `RegistrationError`."""
        if self._refuses("register"):
            raise self._registration_error("register", regions)
        self.engine.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Pass on, or raise `RegistrationError`."""
        if self._refuses("unregister"):
            raise self._registration_error("unregister", regions)
        self.engine.unregister(regions)

    def describe(self) -> bytes:
        """Pass on."""
        return self.engine.describe()

    def connect(self, description: bytes) -> str:
        """Pass on, or raise `TransferFailed`."""
        if self._refuses("connect"):
            raise TransferFailed(self.name, "?", self.code, "injected")
        return self.engine.connect(description)

    def disconnect(self, peer: str) -> None:
        """Pass on."""
        self.engine.disconnect(peer)

    def submit(self, peer: str, src: Addresses, dst: Addresses, lengths: Addresses) -> Pending:
        """Pass on, or raise `TransferFailed`."""
        if self._refuses("submit"):
            raise TransferFailed(self.name, peer, self.code, "injected", operations=len(src))
        return self.engine.submit(peer, src, dst, lengths)

    def close(self) -> None:
        """Pass on."""
        self.engine.close()

    def _refuses(self, op: str) -> bool:
        if op not in self.ops:
            return False
        self.count += 1
        return self.count in self.fail_at

    def _registration_error(self, action: str, regions: Sequence[Region]) -> RegistrationError:
        region = regions[0] if regions else Region(0, 0)
        return RegistrationError(self.name, region, self.code, action=action, meaning="injected")
