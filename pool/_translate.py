"""Reading a page table with token ids, in torch operations that can be captured."""

from __future__ import annotations

import torch
from kvarena.pool.errors import AllocatorError

__all__ = ["page_table", "translate"]


def page_table(v2p: torch.Tensor, virtual_pages: torch.Tensor) -> torch.Tensor:
    """Physical pages of virtual ones; 0, the sink, for what is unmapped or out of range.

    Parameters
    ----------
    v2p : torch.Tensor
        int64; the last entry is never mapped and -1.
    virtual_pages : torch.Tensor
        int32 or int64, of any shape, on the device of `v2p`.

    Raises
    ------
    AllocatorError
        They are of another type.
    """
    _require_integers(virtual_pages)
    # A kernel that reads out of bounds ends the process, so ids out of range read the last entry.
    pages = virtual_pages.reshape(-1).clamp(0, v2p.numel() - 1)
    return v2p.index_select(0, pages).clamp_(min=0).view(virtual_pages.shape)


def translate(
    v2p: torch.Tensor, ids: torch.Tensor, page_size: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Physical token ids of virtual ones; 0 for what is unmapped, out of range, or in the sink.

    Parameters
    ----------
    v2p : torch.Tensor
        As in `page_table`.
    ids : torch.Tensor
        int32 or int64, of any shape, on the device of `v2p`.
    page_size : int
        Tokens a page.
    out : torch.Tensor, optional
        Where to write them: int64, of the shape of `ids` and on their device,
        as SGLang's ``translate_token_ids`` asks for.

    Raises
    ------
    AllocatorError
        `ids` or `out` are not such tensors; nothing is written.
    """
    _require_integers(ids)
    if out is not None:
        _require_room(ids, out)
    if page_size == 1:
        tokens = page_table(v2p, ids)
    else:
        pages = page_table(v2p, torch.div(ids, page_size, rounding_mode="floor"))
        tokens = (pages * page_size).add_(ids.remainder(page_size)).mul_(pages > 0)
    if out is None:
        return tokens
    out.copy_(tokens)
    return out


def _require_integers(ids: torch.Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise AllocatorError(f"Ids of type {ids.dtype}.", fix="Pass int64 (or int32) ids.")


def _require_room(ids: torch.Tensor, out: torch.Tensor) -> None:
    """`copy_` would broadcast to another shape, and truncate to a narrower type."""
    if (out.dtype, out.shape, out.device) != (torch.int64, ids.shape, ids.device):
        raise AllocatorError(
            f"{tuple(ids.shape)} ids on {ids.device} cannot be translated into `out`, which is {out.dtype} "
            f"{tuple(out.shape)} on {out.device}.",
            fix="Pass an int64 tensor of the shape of the ids, on their device.",
        )
