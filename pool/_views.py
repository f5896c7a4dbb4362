"""The per-layer tensors of a sub-pool, as strided views of a pool's raw bytes."""

from __future__ import annotations

import math

import torch
from kvarena.pool.layout import MLASubPoolSpec, SubPoolSpec

__all__ = ["build_views"]


def build_views(
    raw: torch.Tensor, spec: SubPoolSpec, page_size: int, num_pages: int
) -> dict[tuple[int, str], torch.Tensor]:
    """Strided views of every layer's parts over a pool's raw bytes.

    Parameters
    ----------
    raw : torch.Tensor
        uint8, contiguous; page p of the sub-pool starts at byte p × envelope.
    spec : SubPoolSpec
        The sub-pool.
    page_size : int
        Tokens a page.
    num_pages : int
        Pages that the views span.

    Returns
    -------
    dict
        ``(layer, part name)`` to a tensor ``(num_pages, *part shape)``.
    """
    envelope = spec.page_envelope_bytes(page_size)
    views = {}
    for layer in range(spec.layer_num):
        for part in spec.layer_parts(layer, page_size):
            width = part.dtype.itemsize
            typed = raw[: raw.numel() // width * width].view(part.dtype)
            inner = [math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
            views[layer, part.name] = typed.as_strided(
                (num_pages, *part.shape), (envelope // width, *inner), part.offset // width
            )
            if isinstance(spec, MLASubPoolSpec):
                views[layer, "v"] = views[layer, "k"][..., : spec.kv_lora_rank]
    return views
