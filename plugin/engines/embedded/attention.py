"""Attention over the pool's pages, through tables that stay on the device.

A step is given virtual page ids. The physical pages are looked up inside the step, at each run,
so an allocator may move pages between two runs of one captured step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from kvarena.plugin.engines.embedded.config import FULL, WINDOW, EngineConfig

if TYPE_CHECKING:
    from kvarena.pool import UnifiedKVPool, UnifiedSWATokenToKVPoolAllocator

__all__ = ["PagedKV"]


class PagedKV:
    """The pool as a model's layers see it.

    Parameters
    ----------
    config : EngineConfig
        Sizes; fixes which layer lies in which sub-pool.
    pool : UnifiedKVPool
        Whose views are read and written. Reserved or backed: no byte is touched before a step.
    allocator : UnifiedSWATokenToKVPoolAllocator
        Whose virtual-to-physical tables are read. Their storage must not move.
    """

    def __init__(
        self, config: EngineConfig, pool: UnifiedKVPool, allocator: UnifiedSWATokenToKVPoolAllocator
    ) -> None:
        self._config = config
        self._full = _Kind(config, None, allocator.full_attn_allocator.virtual_to_physical)
        self._window = _Kind(config, config.model.window, allocator.swa_attn_allocator.virtual_to_physical)
        self._layers: list[tuple[_Kind, torch.Tensor, torch.Tensor]] = []
        for layer in range(config.model.layer_num):
            name = WINDOW if config.model.is_window(layer) else FULL
            kind = self._window if config.model.is_window(layer) else self._full
            self._layers.append((kind, pool.k_view(name, layer // 2), pool.v_view(name, layer // 2)))

    def views(self) -> list[torch.Tensor]:
        """The K and V view of every layer, in order: their addresses are an invariant."""
        return [view for _, k, v in self._layers for view in (k, v)]

    def tables(self) -> list[torch.Tensor]:
        """The two virtual-to-physical tables."""
        return [self._full.table, self._window.table]

    def begin(self, positions: torch.Tensor, pages: torch.Tensor) -> None:
        """Look up where this step's KV goes and which pages it reads.

        Parameters
        ----------
        positions : torch.Tensor
            (rows, length) int64; negative for padding.
        pages : torch.Tensor
            (rows, width) int64 virtual page ids.
        """
        for kind in (self._full, self._window):
            kind.begin(positions, pages)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write a layer's new KV, then attend to all that each token may see.

        Parameters
        ----------
        layer : int
            Index among all layers.
        q : torch.Tensor
            (rows, length, head_num, head_dim)
        k, v : torch.Tensor
            (rows, length, kv_heads, head_dim)

        Returns
        -------
        torch.Tensor
            (rows, length, head_num, head_dim) float32.
        """
        kind, k_view, v_view = self._layers[layer]
        at = (kind.write_pages, kind.write_offsets)
        k_view.index_put_(at, k.to(k_view.dtype))
        v_view.index_put_(at, v.to(v_view.dtype))
        rows, heads, head_dim = q.shape[0], k.shape[2], k.shape[3]
        keys = k_view[kind.read_pages].view(rows, -1, heads, head_dim).to(torch.float32)
        values = v_view[kind.read_pages].view(rows, -1, heads, head_dim).to(torch.float32)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=kind.bias,
            enable_gqa=True,
        )
        return mixed.transpose(1, 2)


class _Kind:
    """What the layers of one sub-pool share in a step."""

    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    read_pages: torch.Tensor
    bias: torch.Tensor

    def __init__(self, config: EngineConfig, window: int | None, table: torch.Tensor) -> None:
        self._page_size = config.page_size
        self._window = window
        self.table = table

    def begin(self, positions: torch.Tensor, pages: torch.Tensor) -> None:
        size = self._page_size
        width = pages.shape[1]
        real = positions >= 0
        # Padding asks as the row's first token does: a query that saw no key would be NaN, and its
        # KV would carry the NaN into the sink.
        at = torch.maximum(positions, positions[:, :1].clamp(min=0))
        # Padding writes to slot 0: virtual page 0 is the sink's, whatever the table holds there.
        written = torch.where(real, pages.gather(1, at // size), 0)
        self.write_pages = self._physical(written)
        self.write_offsets = torch.where(real, at % size, 0)
        if self._window is None:
            read = pages
            first_key = torch.zeros_like(at[:, :1])
        else:
            length = positions.shape[1]
            span = min(width, math.ceil((length + self._window - 1) / size) + 1)
            first = (at[:, :1] - self._window + 1).clamp(min=0) // size
            index = first + torch.arange(span, device=pages.device)
            read = torch.where(index < width, pages.gather(1, index.clamp(max=width - 1)), 0)
            first_key = first * size
        self.read_pages = self._physical(read)
        keys = first_key + torch.arange(read.shape[1] * size, device=pages.device)
        seen = keys[:, None, :] <= at[:, :, None]
        if self._window is not None:
            seen &= keys[:, None, :] > at[:, :, None] - self._window
        bias = torch.zeros(seen.shape, device=pages.device).masked_fill(~seen, -torch.inf)
        self.bias = bias[:, None]

    def _physical(self, pages: torch.Tensor) -> torch.Tensor:
        # A tombstone is not a page; it reads the sink, and the mask hides what is there.
        return self.table[pages].clamp(min=0)
