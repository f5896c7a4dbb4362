"""What SGLang's pools report to transfer engines: the bytes that are backed, in every kind of sub-pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvarena.plugin.engines.sglang.bound import bound_of
from kvarena.plugin.engines.sglang.runtime import runtime

__all__ = ["contiguous_buf_infos"]

Infos = tuple[list[int], list[int], list[int]]


def contiguous_buf_infos(original: Callable[[Any], Infos], self: Any) -> Infos:
    """Around ``get_contiguous_buf_infos``: stock reports the whole reservation for MLA and Mamba sub-pools
    (and for all up to 0.5.21), although only a prefix has memory.

    Before finalize that prefix is the sink; registrations made then are made again afterwards.
    """
    bound = bound_of(self)
    if bound is None:
        return original(self)
    if not bound.finalized:
        runtime.log_once(
            logging.WARNING,
            "kvarena: buffers are asked for before the pool is finalized: only the sink's "
            f"{bound.sink_bytes} bytes are reported; what is registered now is registered again later.",
        )
    ptrs, _, item_lens = original(self)
    return ptrs, [bound.active_allocation_bytes] * len(ptrs), item_lens
