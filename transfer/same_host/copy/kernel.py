"""The gather-scatter kernels, compiled ahead of their first use; importing this needs Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "Compiled",
    "Tuning",
    "compile_pages",
    "compile_spans",
    "page_cut",
    "page_tuning",
    "span_cut",
]

_VECTOR = 16
"""Bytes of the widest access of one thread; what is a multiple of it moves in such accesses."""

_MIN_SPAN = 4096
"""Bytes: smaller programs spend more on reading their table than on copying."""


@dataclass(frozen=True)
class Tuning:
    """How a copy is cut into programs."""

    span_bytes: int = 16 * 1024
    """What one program copies; a power of two. All its loads are in flight before its first store."""
    num_warps: int = 8
    eviction: str = ""
    """Triton's eviction policy of loads and stores; empty: the default."""


@dataclass(frozen=True)
class Compiled:
    """Machine code and how to launch it."""

    name: str
    cubin: bytes
    threads: int
    shared_bytes: int
    word_bytes: int
    span_words: int


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_pages(  # type: ignore[no-untyped-def]
    src,
    dst,
    ids,
    PAGE_WORDS: tl.constexpr,
    SPAN_WORDS: tl.constexpr,
    EVICT: tl.constexpr,
):
    SPANS: tl.constexpr = (PAGE_WORDS + SPAN_WORDS - 1) // SPAN_WORDS
    program = tl.program_id(0)
    # One load: every read of host memory is a round trip over the bus, and there are only so many a second.
    pair = tl.load(ids + program // SPANS)
    words = (program % SPANS) * SPAN_WORDS + tl.arange(0, SPAN_WORDS)
    source = src + (pair & 0xFFFFFFFF) * PAGE_WORDS + words
    target = dst + (pair >> 32) * PAGE_WORDS + words
    if PAGE_WORDS % SPAN_WORDS == 0:
        tl.store(target, tl.load(source, eviction_policy=EVICT), eviction_policy=EVICT)
    else:
        inside = words < PAGE_WORDS
        tl.store(
            target, tl.load(source, mask=inside, eviction_policy=EVICT), mask=inside, eviction_policy=EVICT
        )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_spans(  # type: ignore[no-untyped-def]
    table, WORD: tl.constexpr, ALIGN: tl.constexpr, SPAN_WORDS: tl.constexpr, EVICT: tl.constexpr
):
    row = table + tl.program_id(0).to(tl.int64) * 3
    source = tl.load(row).to(tl.pointer_type(WORD))
    target = tl.load(row + 1).to(tl.pointer_type(WORD))
    count = tl.load(row + 2)
    source = tl.multiple_of(source, ALIGN)
    target = tl.multiple_of(target, ALIGN)
    if ALIGN > 1:
        count = tl.multiple_of(count, 4)
    words = tl.arange(0, SPAN_WORDS)
    inside = words < count
    tl.store(
        target + words,
        tl.load(source + words, mask=inside, eviction_policy=EVICT),
        mask=inside,
        eviction_policy=EVICT,
    )


def page_tuning(page_bytes: int, aligned: bool) -> Tuning:
    """How pages of this size are cut best: measured on an H200 (docs/engines/same-host.md)."""
    if not aligned:  # the larger programs would not have the registers for single bytes
        return Tuning()
    if page_bytes % (128 * 1024) == 0:
        return Tuning(128 * 1024, 32)
    if page_bytes % (64 * 1024) == 0:
        return Tuning(64 * 1024, 16)
    return Tuning()


def page_cut(page_bytes: int, aligned: bool, tuning: Tuning) -> tuple[int, int]:
    """Bytes of the words that a page is copied in, and how many of them one program takes."""
    word = 4 if aligned and page_bytes % _VECTOR == 0 else 1
    return word, _span_words(_page_span(page_bytes, tuning.span_bytes), word, tuning.num_warps)


def span_cut(aligned: bool, tuning: Tuning) -> tuple[int, int]:
    """As `page_cut`, for ranges of any length."""
    word = 4 if aligned else 1
    return word, _span_words(tuning.span_bytes, word, tuning.num_warps)


def compile_pages(capability: int, page_bytes: int, aligned: bool, tuning: Tuning) -> Compiled:
    """A kernel for pages of one size.

    Its parameters: source base, destination base, and a table of int64 with a source page in the low half
    of each word and a destination page in the high one. It takes one program for each span of each page.

    Parameters
    ----------
    capability : int
        Compute capability, 90 for 9.0.
    aligned : bool
        Whether both bases are multiples of 16 bytes.
    """
    word, span = page_cut(page_bytes, aligned, tuning)
    fast = word > 1
    pointer = "*i32" if fast else "*i8"
    source = _source(
        _copy_pages,
        {"src": pointer, "dst": pointer, "ids": "*i64"},
        {
            "PAGE_WORDS": page_bytes // word,
            "SPAN_WORDS": span,
            "EVICT": tuning.eviction,
        },
        aligned=(0, 1, 2) if fast else (2,),
    )
    return _compile(source, capability, tuning.num_warps, word, span)


def compile_spans(capability: int, aligned: bool, tuning: Tuning) -> Compiled:
    """A kernel for ranges of any length; its parameter is a table of (source, destination, words) in int64.

    `aligned`: whether every address and length is a multiple of 16 bytes. A program takes one row.
    """
    word, span = span_cut(aligned, tuning)
    source = _source(
        _copy_spans,
        {"table": "*i64"},
        {
            "WORD": tl.int32 if aligned else tl.int8,
            "ALIGN": _VECTOR if aligned else 1,
            "SPAN_WORDS": span,
            "EVICT": tuning.eviction,
        },
        aligned=(0,),
    )
    return _compile(source, capability, tuning.num_warps, word, span)


def _span_words(span_bytes: int, word: int, num_warps: int) -> int:
    if word == 1:
        span_bytes //= 4  # as many accesses in flight, each of one byte, take as many registers
    # Fewer words than threads would make several threads copy the same word.
    return max(span_bytes // word, num_warps * 32)


def _page_span(page_bytes: int, maximum: int) -> int:
    """Bytes of a span, a power of two: one that divides the page saves the masks."""
    divisor = page_bytes & -page_bytes
    if divisor >= _MIN_SPAN:
        return min(maximum, divisor)
    return min(maximum, 1 << (page_bytes - 1).bit_length())


def _source(
    fn: Any, arguments: dict[str, str], constants: dict[str, Any], *, aligned: tuple[int, ...]
) -> Any:
    from triton.compiler import ASTSource

    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    attributes = {(index,): [["tt.divisibility", _VECTOR]] for index in aligned}
    return ASTSource(fn=fn, signature=signature, constexprs=places, attrs=attributes)


def _compile(source: Any, capability: int, num_warps: int, word: int, span: int) -> Compiled:
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}
    )
    meta = kernel.metadata
    scratch = getattr(meta, "global_scratch_size", 0) or 0
    if scratch:
        raise RuntimeError(
            f"{meta.name} wants {scratch} bytes of scratch memory, which this launcher has not"
        )
    return Compiled(meta.name, kernel.asm["cubin"], num_warps * 32, meta.shared, word, span)
