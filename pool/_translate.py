"""Reading a page table with token ids, in torch operations that can be captured."""

from __future__ import annotations

import torch

__all__ = ["page_table", "translate"]


def page_table(v2p: torch.Tensor, virtual_pages: torch.Tensor) -> torch.Tensor:
    """Physical pages of virtual ones; 0, the sink, for what is unmapped or out of range.

    Parameters
    ----------
    v2p : torch.Tensor
        int64; the last entry is never mapped and -1.
    virtual_pages : torch.Tensor
        Integers of any shape, on the device of `v2p`.
    """
    # A kernel that reads out of bounds ends the process, so ids out of range read the last entry.
    pages = virtual_pages.reshape(-1).clamp(0, v2p.numel() - 1)
    return v2p.index_select(0, pages).clamp_(min=0).view(virtual_pages.shape)


def translate(
    v2p: torch.Tensor, ids: torch.Tensor, page_size: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Physical token ids of virtual ones; 0 for what is unmapped, out of range, or in the sink."""
    if page_size == 1:
        tokens = page_table(v2p, ids)
    else:
        pages = page_table(v2p, torch.div(ids, page_size, rounding_mode="floor"))
        tokens = (pages * page_size).add_(ids.remainder(page_size)).mul_(pages > 0)
    if out is None:
        return tokens
    out.copy_(tokens)
    return out
