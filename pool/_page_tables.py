"""The tables between virtual and physical pages, on the host and on the device."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from kvarena.pool._free_pages import Pages

__all__ = ["UNMAPPED", "PageTables"]

UNMAPPED = -1


@final
class PageTables:
    """``virtual_to_physical`` and ``physical_to_virtual``, in pages.

    The host's copies are what bookkeeping reads, so that it never waits for
    the device. On the CPU the tensors *are* the host's copies; elsewhere each
    change is one staged upload on the current stream. The storage is made
    once: captured graphs hold its address.

    ``generations`` counts for each virtual page how often it was freed, so
    that a page noted before can be told from one that was given out again.

    Parameters
    ----------
    virtual_pages, physical_pages : int
        Entries for the largest size that the pool may ever have. Each table
        has one entry more, never mapped, which ids out of range resolve to.
    device : torch.device
        Where kernels read the tables.
    """

    __slots__ = (
        "_on_host",
        "device",
        "generations",
        "p2v",
        "physical_to_virtual",
        "v2p",
        "virtual_to_physical",
    )

    def __init__(self, virtual_pages: int, physical_pages: int, device: torch.device) -> None:
        self.v2p: Pages = np.empty(virtual_pages + 1, dtype=np.int64)
        self.p2v: Pages = np.empty(physical_pages + 1, dtype=np.int64)
        self.generations: Pages = np.zeros(virtual_pages + 1, dtype=np.int64)
        self.device = device
        self._on_host = device.type == "cpu"
        if self._on_host:
            self.virtual_to_physical = torch.from_numpy(self.v2p)
            self.physical_to_virtual = torch.from_numpy(self.p2v)
        else:
            self.virtual_to_physical = torch.empty(len(self.v2p), dtype=torch.int64, device=device)
            self.physical_to_virtual = torch.empty(len(self.p2v), dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Unmap everything but page 0, the sink, which maps to itself."""
        self.generations += 1
        for host, table in ((self.v2p, self.virtual_to_physical), (self.p2v, self.physical_to_virtual)):
            host.fill(UNMAPPED)
            host[0] = 0
            if not self._on_host:
                # fill_ is a kernel; assigning a Python number would copy it from pageable memory.
                table.fill_(UNMAPPED)
                table[:1].fill_(0)

    def bind(self, virtual: Pages, physical: Pages) -> None:
        """Map virtual pages to physical ones, pairwise."""
        self.v2p[virtual] = physical
        self.p2v[physical] = virtual
        if not self._on_host:
            v, p = self._upload(virtual, physical)
            self.virtual_to_physical.index_copy_(0, v, p)
            self.physical_to_virtual.index_copy_(0, p, v)

    def unbind(self, virtual: Pages, physical: Pages) -> None:
        """Take the mapping of pairs away."""
        self.generations[virtual] += 1
        self.v2p[virtual] = UNMAPPED
        self.p2v[physical] = UNMAPPED
        if not self._on_host:
            v, p = self._upload(virtual, physical)
            self.virtual_to_physical.index_fill_(0, v, UNMAPPED)
            self.physical_to_virtual.index_fill_(0, p, UNMAPPED)

    def rebind(self, virtual: Pages, old: Pages, new: Pages) -> None:
        """Point virtual pages from old physical pages to new ones."""
        self.v2p[virtual] = new
        self.p2v[old] = UNMAPPED
        self.p2v[new] = virtual
        if not self._on_host:
            v, before, after = self._upload(virtual, old, new)
            self.virtual_to_physical.index_copy_(0, v, after)
            self.physical_to_virtual.index_fill_(0, before, UNMAPPED)
            self.physical_to_virtual.index_copy_(0, after, v)

    def for_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The ``virtual_to_physical`` copy that lies where `ids` lie."""
        if ids.device == self.virtual_to_physical.device or ids.device.type != "cpu":
            return self.virtual_to_physical
        return torch.from_numpy(self.v2p)

    def violations(self) -> list[str]:
        """What does not add up. O(pool), and waits for the device: for tests and idle checks."""
        found = []
        if self.v2p[0] != 0 or self.p2v[0] != 0:
            found.append("page 0 does not map to itself")
        if self.v2p[-1] != UNMAPPED or self.p2v[-1] != UNMAPPED:
            found.append("the entry behind the last page is mapped")
        virtual = np.flatnonzero(self.v2p >= 0)
        if not np.array_equal(self.p2v[self.v2p[virtual]], virtual):
            found.append("physical_to_virtual is not the inverse of virtual_to_physical")
        if len(virtual) != np.count_nonzero(self.p2v >= 0):
            found.append("the tables map different numbers of pages")
        if not self._on_host:
            for name, host, table in (
                ("virtual_to_physical", self.v2p, self.virtual_to_physical),
                ("physical_to_virtual", self.p2v, self.physical_to_virtual),
            ):
                if not np.array_equal(table.cpu().numpy(), host):
                    found.append(f"the device's {name} differs from the host's")
        return found

    def _upload(self, *columns: Pages) -> tuple[torch.Tensor, ...]:
        # Pinned and non-blocking: torch keeps the staging memory until the copy has run.
        staged = torch.empty((len(columns), len(columns[0])), dtype=torch.int64, pin_memory=True)
        rows = staged.numpy()
        for row, column in zip(rows, columns, strict=True):
            row[:] = column
        return staged.to(self.device, non_blocking=True).unbind(0)
