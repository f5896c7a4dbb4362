"""What SGLang allocates after the pool has its size, in nobody's budget."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["later_allocations"]

_MIB = 1 << 20
_TRUE = ("1", "true", "yes", "y", "on")


def later_allocations(
    config: Any,
    *,
    chunk_bytes: int,
    mla: bool,
    vocabulary: int,
    input_logprobs: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[tuple[str, int], ...]:
    """Each by name, in bytes.

    Parameters
    ----------
    config : object
        SGLang's resolved arguments.
    chunk_bytes : int
        KV of one prefill chunk on this rank.
    mla : bool
        Staging is for models whose heads are split, which MLA's are not.
    vocabulary : int
        Entries of one row of logits.
    input_logprobs : bool
        Whether requests may ask for the log-probabilities of their prompts.
    environ : mapping, optional
        Instead of the process's environment.

    Notes
    -----
    Not here: a vision model's reservation, which SGLang subtracts itself, and the decode graphs of a later
    role switch, which it captures only where the switch says how much they take and that much is free.
    """
    environ = os.environ if environ is None else environ
    found = []
    if environ.get("SGLANG_DISAGG_STAGING_BUFFER", "").strip().lower() in _TRUE and not mla:
        if config.disaggregation_mode == "decode":
            ring = _number(environ, "SGLANG_DISAGG_STAGING_POOL_SIZE_MB", 4096) * _MIB
            found.append(("staging ring", ring))
        elif config.disaggregation_mode == "prefill":
            workers = _number(environ, "SGLANG_DISAGGREGATION_QUEUE_SIZE", 4)
            found.append((f"{workers} staging buffers", workers * chunk_bytes))
    if input_logprobs and config.disaggregation_mode != "decode":
        tokens = _chunk(config)
        # The logits of a chunk and their logarithms, as float32.
        found.append(("input log-probabilities", 2 * 4 * tokens * vocabulary))
    return tuple((name, nbytes) for name, nbytes in found if nbytes > 0)


def _chunk(config: Any) -> int:
    chunked = config.chunked_prefill_size or 0
    return int(chunked if chunked > 0 else config.max_prefill_tokens)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return max(0, int(environ.get(name) or default))
    except ValueError:
        return default  # SGLang says itself what is wrong with it
