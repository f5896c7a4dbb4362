"""What an arena asks of a device's virtual memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Driver"]


class Driver(Protocol):
    """Virtual memory of one device: addresses, handles, and mappings between them.

    Every method is all or nothing: one that raises leaves no address, handle or mapping behind,
    except as `MappingLeftError` says. Whatever needs a file descriptor raises `DescriptorLimitError`
    when none is left. Sizes and addresses are bytes and multiples of `granularity`, except in `zero`
    and `tensor`.
    """

    @property
    def name(self) -> str:
        """``"cuda"`` or ``"host"``; an adaptor answers as what it stands on."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        ...

    @property
    def granularity(self) -> int:
        """Bytes: the smallest amount that can be created and mapped."""
        ...

    @property
    def rdma_capable(self) -> bool:
        """Whether handles are created so that a network card may reach them."""
        ...

    @property
    def fresh_is_zero(self) -> bool:
        """Whether the memory of a new handle reads zero, so that nobody need call `zero`."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Set addresses aside, without memory, and return the first."""
        ...

    def release_reservation(self, address: int, nbytes: int) -> None:
        """Give addresses back; nothing may be mapped there."""
        ...

    def create(self, nbytes: int) -> int:
        """Take physical memory and return its handle. Raises `OutOfMemoryError`."""
        ...

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a whole handle into a reservation, readable and writable.

        Raises `MappingLeftError` when it failed halfway and what it had done could not be undone.
        """
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Take the mapping of a whole handle away; waits for work that may use it."""
        ...

    def is_mapped(self, address: int, nbytes: int) -> bool:
        """Whether a handle of `nbytes` is mapped at `address`; asked before every change, so it is quick."""
        ...

    def release(self, handle: int) -> None:
        """Drop a handle; its memory is free once nothing maps it. Raises `UnknownHandleError`."""
        ...

    def export_fd(self, handle: int) -> int:
        """A new file descriptor that another process can import; the caller closes it."""
        ...

    def import_fd(self, fd: int, nbytes: int) -> int:
        """A handle to memory that another process exported; `fd` stays the caller's."""
        ...

    def free_bytes(self) -> int:
        """Memory that `create` could still take, as measured now."""
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Fill backed bytes with zero, ordered before work submitted later."""
        ...

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over addresses, backed or not; it owns nothing."""
        ...
