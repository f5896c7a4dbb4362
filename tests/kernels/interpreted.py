"""Runs the kernels in Triton's interpreter on host memory, and prints what came out of each as JSON.

A process of its own: whether Triton compiles or interprets is decided when the kernels are imported.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from kvarena.transfer.same_host.copy import kernel as kernels
from kvarena.transfer.same_host.copy.cuda import _cut

PLACES, MOVED = 12, 5
POISON = -77
PAGE_BYTES = [7, 16, 48, 100, 257, 4096, 12288, 12304, 16384, 65536, 131072, 1 << 20]
# Offsets of source and target, and bytes: one word, an odd tail, more than one program, exactly two.
SPANS = {
    True: [(0, 4096, 16), (32, 0, 16384), (65536, 131072, 40000), (262144, 32768, 32768)],
    False: [(1, 4097, 1), (33, 7, 333), (65537, 131075, 40001), (262145, 32771, 8192)],
}


@dataclass
class Outcome:
    """One case."""

    name: str
    programs: int
    right: bool


def memory(nbytes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random bytes to copy from, and twice poison to copy to."""
    source = torch.randint(
        -128, 127, (nbytes,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
    )
    return source, torch.full_like(source, POISON), torch.full_like(source, POISON)


def pages(page_bytes: int, aligned: bool) -> Outcome:
    """Random pages onto random places; whatever was not asked for must stay poison."""
    tuning = kernels.page_tuning(page_bytes, aligned)
    word, span = kernels.page_cut(page_bytes, aligned, tuning)
    source, target, expected = memory(PLACES * page_bytes, page_bytes)
    rng = np.random.default_rng(page_bytes)
    src, dst = rng.permutation(PLACES)[:MOVED], rng.permutation(PLACES)[:MOVED]
    words = torch.int32 if word == 4 else torch.int8
    programs = MOVED * -(-page_bytes // (span * word))
    kernels._copy_pages[(programs,)](
        source.view(words),
        target.view(words),
        torch.from_numpy(dst << 32 | src),
        PAGE_WORDS=page_bytes // word,
        SPAN_WORDS=span,
        EVICT=tuning.eviction,
    )
    rows = expected.view(PLACES, page_bytes)
    rows[torch.from_numpy(dst)] = source.view(PLACES, page_bytes)[torch.from_numpy(src)]
    return Outcome(
        f"pages-{page_bytes}-{'aligned' if aligned else 'odd'}", programs, torch.equal(target, expected)
    )


def spans(aligned: bool, *, short: bool = False) -> Outcome:
    """Ranges of several lengths, cut into programs as the copier cuts them; `short`: none needs it."""
    tuning = kernels.Tuning()
    word, span = kernels.span_cut(aligned, tuning)
    source, target, expected = memory(1 << 19, 1)
    chosen = [each for each in SPANS[aligned] if not short or each[2] <= span * word]
    src, dst, lengths = np.array(chosen, np.int64).T
    rows = _cut(source.data_ptr() + src, target.data_ptr() + dst, lengths, span * word)
    rows[:, 2] //= word
    kernels._copy_spans[(len(rows),)](
        torch.from_numpy(rows),
        WORD=tl.int32 if word == 4 else tl.int8,
        ALIGN=16 if aligned else 1,
        SPAN_WORDS=span,
        EVICT=tuning.eviction,
    )
    for start, end, nbytes in chosen:
        expected[end : end + nbytes] = source[start : start + nbytes]
    name = f"{'short-' if short else ''}spans-{'aligned' if aligned else 'odd'}"
    return Outcome(name, len(rows), torch.equal(target, expected))


if __name__ == "__main__":
    outcomes = [pages(nbytes, aligned) for nbytes in PAGE_BYTES for aligned in (True, False)]
    outcomes += [spans(aligned, short=short) for aligned in (True, False) for short in (True, False)]
    json.dump([asdict(outcome) for outcome in outcomes], sys.stdout)
