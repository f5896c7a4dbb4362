"""The sizes that finalize takes, and that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from kvarena.errors import KvArenaError
from kvarena.pool._counts import as_count
from kvarena.pool.budget import PoolCost, SubPoolCost, tokens_for_budget
from kvarena.pool.errors import PoolSizeError

if TYPE_CHECKING:
    from kvarena.pool.unified_kv_pool import UnifiedKVPool

__all__ = [
    "PoolCost",
    "PostCaptureKVResize",
    "RanksDisagreeError",
    "SubPoolCost",
    "agree",
    "resize_for",
    "resize_for_tokens",
    "smaller_resize",
    "tokens_for_budget",
]


class PostCaptureKVResize(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes after capture, by the names of SGLang 0.5.23's struct."""

    max_total_num_tokens: int
    """Tokens that the pool holds."""
    full_max_total_num_tokens: int | None = None
    """Tokens that the full-attention side holds."""
    swa_max_total_num_tokens: int | None = None
    """Tokens that the window side holds."""
    unified_memory_pool_bytes: int | None = None
    """Bytes of the pool, the sink included: what `UnifiedKVPool.finalize_backing` takes."""
    capped_max_running_requests: int | None = None
    """The number of requests, where it has to be lowered."""


class RanksDisagreeError(KvArenaError):
    """At least one rank could not size its pool, so none may.

    Parameters
    ----------
    failures : mapping of int to str
        Rank to reason.
    ranks : int
        How many there are.
    """

    def __init__(self, failures: Mapping[int, str], ranks: int) -> None:
        self.failures = dict(failures)
        what = "; ".join(f"rank {rank}: {reason.rstrip('.')}" for rank, reason in self.failures.items())
        super().__init__(
            f"{len(self.failures)} of {ranks} ranks could not size their pool: {what}.",
            fix="Give those ranks more memory, or lower what one request needs.",
        )


def agree(
    tokens: int | str | Sequence[int | str],
    gather: Callable[[int | str], Sequence[int | str]] | None = None,
) -> int:
    """The tokens that every rank can hold: the minimum of tokens, not of bytes.

    Stages of a pipeline differ in layers, so the rank with the least memory
    may well hold the most tokens.

    Parameters
    ----------
    tokens : int or str, or a sequence of them
        This rank's tokens, or, as a text, why it has none; without `gather`,
        those of all ranks.
    gather : callable, optional
        Exchanges a rank's value for those of all ranks, in order.

    Raises
    ------
    RanksDisagreeError
        A rank failed; every rank raises this, with each failed rank's reason.
    """
    values: Sequence[int | str]
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        # Also what is no count is exchanged: the others are waiting for this rank.
        values = [tokens] if gather is None else gather(tokens)
    elif gather is not None:
        raise TypeError("with gather, tokens is this rank's own value")
    else:
        values = tokens
    counts = [as_count(value) for value in values]
    failures = {
        rank: value if isinstance(value, str) else f"it has {value} tokens"
        for rank, (value, count) in enumerate(zip(values, counts, strict=True))
        if count is None or count <= 0
    }
    if failures or not values:
        raise RanksDisagreeError(failures, len(values))
    return min(count for count in counts if count is not None)


def resize_for(pool: UnifiedKVPool, total_bytes: int) -> PostCaptureKVResize:
    """The sizes of a pool at `total_bytes`, as its allocators will have them.

    A side's tokens are what it holds when the other is empty: both share the bytes. States are no tokens.

    Raises
    ------
    PoolSizeError
        The pool cannot have this size.
    """
    from kvarena.pool.layout import MambaSubPoolSpec

    total_bytes = pool.check_total_bytes(total_bytes)
    tokens = {
        spec.name: (total_bytes // pool.page_bytes(spec.name) - pool.min_page_index(spec.name))
        * pool.slots_per_page(spec.name)
        for spec in pool.sub_pool_specs
        if not isinstance(spec, MambaSubPoolSpec)
    }
    full, swa = tokens.get("full"), tokens.get("swa")
    if full is not None and swa is not None:
        swa = min(full, swa)  # the full side owns the ids
    return PostCaptureKVResize(
        max_total_num_tokens=min(tokens.values(), default=0) if full is None else full,
        full_max_total_num_tokens=full,
        swa_max_total_num_tokens=swa,
        unified_memory_pool_bytes=total_bytes,
    )


def resize_for_tokens(pool: UnifiedKVPool, tokens: int) -> PostCaptureKVResize:
    """The smallest size of a pool that holds `tokens` tokens; for ranks, which agree on tokens.

    Raises
    ------
    PoolSizeError
        The pool cannot be so small, or so large.
    """
    from kvarena.pool.layout import MambaSubPoolSpec

    sides = {spec.name for spec in pool.sub_pool_specs if not isinstance(spec, MambaSubPoolSpec)}
    names = {"full"} & sides or sides
    total_bytes = max(
        (
            (pool.min_page_index(name) - -tokens // pool.slots_per_page(name)) * pool.page_bytes(name)
            for name in names
        ),
        default=pool.floor_bytes,
    )
    return resize_for(pool, total_bytes)


def smaller_resize(
    pool: UnifiedKVPool, resize: PostCaptureKVResize, total_bytes: int | None = None
) -> PostCaptureKVResize:
    """`resize` for fewer bytes: no figure grows, and what bytes do not decide stays as it was.

    Parameters
    ----------
    pool : UnifiedKVPool
        Whose size it is.
    resize : PostCaptureKVResize
        What could not be backed.
    total_bytes : int, optional
        The bytes to try. By default what the device has free now, but at least a sixty-fourth less, since
        it refused the last size, and never less than one request needs.

    Raises
    ------
    PoolSizeError
        `resize` was at the floor already, or `total_bytes` is below it.
    """
    last = resize.unified_memory_pool_bytes
    if total_bytes is None:
        if last is None or last <= pool.floor_bytes:
            raise PoolSizeError(
                f"Not even the {pool.floor_bytes} bytes that one request needs could be backed.",
                requested=last,
                minimum=pool.floor_bytes,
                maximum=pool.reserved_bytes,
                fix="Free memory on the device, or lower the context length.",
            )
        total_bytes = max(pool.floor_bytes, min(pool.driver.free_bytes(), last - last // 64))
    fresh = resize_for(pool, total_bytes)
    kept: dict[str, Any] = {
        name: min(value, asked)
        for name in ("max_total_num_tokens", "full_max_total_num_tokens", "swa_max_total_num_tokens")
        if (value := getattr(fresh, name)) is not None and (asked := getattr(resize, name)) is not None
    }
    kept["capped_max_running_requests"] = resize.capped_max_running_requests
    return msgspec.structs.replace(fresh, **kept)
