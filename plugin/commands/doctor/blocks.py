"""Memory to try things on: filled and compared without torch where there is no GPU, which saves seconds."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from kvarena.pool import Arena

__all__ = ["Block", "make_block", "make_plain_block"]


class Block(Protocol):
    """Bytes on a device."""

    address: int
    nbytes: int

    def fill(self, value: int) -> None:
        """Set every byte of the block to `value`."""
        ...

    def holds(self, value: int) -> bool:
        """Whether every byte is `value`."""
        ...


def make_block(arena: Arena) -> Block:
    """The whole of an arena."""
    if arena.driver.name == "host":
        return _HostBlock(arena.base, arena.reserved_bytes)
    return _CudaBlock(arena.tensor)


def make_plain_block(device: str, nbytes: int) -> Block:
    """Ordinary memory of the same device, as an engine without an arena would have."""
    if not device.startswith("cuda"):
        memory = np.zeros(nbytes, np.uint8)
        return _HostBlock(int(memory.ctypes.data), nbytes, memory)
    import torch

    return _CudaBlock(torch.zeros(nbytes, dtype=torch.uint8, device=device))


class _HostBlock:
    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self.address = address
        self.nbytes = nbytes
        self._owner = owner
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        self._bytes = np.frombuffer(memoryview(buffer), np.uint8)

    def fill(self, value: int) -> None:
        self._bytes[:] = value

    def holds(self, value: int) -> bool:
        return bool((self._bytes == value).all())


class _CudaBlock:
    def __init__(self, tensor: Any) -> None:
        self.address = int(tensor.data_ptr())
        self.nbytes = int(tensor.numel())
        self._tensor = tensor

    def fill(self, value: int) -> None:
        import torch

        self._tensor.fill_(value)
        torch.cuda.synchronize(self._tensor.device)

    def holds(self, value: int) -> bool:
        import torch

        torch.cuda.synchronize(self._tensor.device)
        return bool((self._tensor == value).all())
