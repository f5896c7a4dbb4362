"""What the same-host engine asks of an arena; `kvarena.pool.Arena` answers it without either knowing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["ArenaMapping", "ArenaMemory", "MemoryDriver"]


class ArenaMapping(Protocol):
    """One physical handle and where it is mapped."""

    @property
    def offset(self) -> int:
        """Bytes from the arena's base."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the handle."""
        ...

    @property
    def handle(self) -> int:
        """The driver's own name for it."""
        ...


class MemoryDriver(Protocol):
    """Virtual memory of one device: just what mapping a peer's handles takes."""

    @property
    def name(self) -> str:
        """``"cuda"`` or ``"host"``: which copier moves its bytes."""
        ...

    @property
    def device(self) -> Any:
        """A torch device; its ``index`` is read for CUDA."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Set addresses aside."""
        ...

    def release_reservation(self, address: int, nbytes: int) -> None:
        """Give them back."""
        ...

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a whole handle, readable and writable by this device."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Take its mapping away."""
        ...

    def release(self, handle: int) -> None:
        """Give up this handle; the memory goes when nothing has it mapped."""
        ...

    def export_fd(self, handle: int) -> int:
        """A new descriptor for another process."""
        ...

    def import_fd(self, fd: int, nbytes: int) -> int:
        """A handle from another process's descriptor, which stays the caller's."""
        ...


class ArenaMemory(Protocol):
    """One range of addresses, backed from its start."""

    @property
    def driver(self) -> MemoryDriver:
        """What maps it."""
        ...

    @property
    def base(self) -> int:
        """The first address."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses."""
        ...

    @property
    def backed_bytes(self) -> int:
        """Bytes from the base that have memory."""
        ...

    @property
    def mappings(self) -> Sequence[ArenaMapping]:
        """The handles behind them, by offset."""
        ...
