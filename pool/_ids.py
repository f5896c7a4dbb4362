"""From what callers pass as ids to checked pages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from kvarena.pool._counts import as_count
from kvarena.pool._free_pages import Pages
from kvarena.pool.errors import AllocatorError

__all__ = ["Ids", "PageReader", "count_of", "tokens_of"]

Ids: TypeAlias = "torch.Tensor | npt.NDArray[Any] | Sequence[int]"


@final
class PageReader:
    """Reads token ids as the distinct pages that they lie in, page 0 left out.

    Page 0 is the sink: engines pad with it, so naming it asks for nothing.

    Parameters
    ----------
    virtual_pages : int
        Entries of the table that the pages index.
    page_size : int
        Tokens per page.
    name : str
        The sub-pool's name, for error texts.
    """

    __slots__ = ("_marks", "_name", "_page_size", "_virtual_pages")

    def __init__(self, virtual_pages: int, page_size: int, name: str) -> None:
        self._virtual_pages = virtual_pages
        self._page_size = page_size
        self._name = name
        # Where the call at hand saw each page; stale entries are overwritten before they are read.
        self._marks = np.zeros(virtual_pages, dtype=np.int64)

    def pages(self, ids: Ids) -> Pages:
        """Distinct pages of token ids in any order, in the order of first mention.

        Raises
        ------
        AllocatorError
            The ids are not integers, or lie outside the virtual id space.
        """
        tokens = self.host(ids)
        return self.distinct(tokens if self._page_size == 1 else tokens // self._page_size)

    def segment_pages(self, ids: Ids, start_pos: int) -> Pages:
        """Distinct pages of a run of a request's tokens that starts at a page's first token.

        Raises
        ------
        AllocatorError
            As `pages`; also when `start_pos` is not the first token of a page,
            or the ids are not whole pages in order (the last may be partial).
        """
        size = self._page_size
        start = as_count(start_pos)
        if start is None or start < 0 or start % size:
            raise AllocatorError(
                f"{self._name}: a segment starts at position {start_pos}, which is not the first of a page "
                f"of {size} tokens.",
                fix="Start segments at multiples of the page size.",
            )
        tokens = self.host(ids)
        if size == 1:
            return self.distinct(tokens)
        pages = tokens[::size] // size
        expected = tokens_of(pages, size)[: len(tokens)]
        # Position 0 of every request's padding is the sink, whose ids may repeat.
        odd = np.flatnonzero((tokens != expected) & (tokens >= size))
        if len(odd):
            raise AllocatorError(
                f"{self._name}: id {tokens[odd[0]]} at place {odd[0]} of a segment breaks the run of whole "
                f"pages of {size} tokens ({expected[odd[0]]} belongs there).",
                fix="Free scattered tokens with free or free_swa.",
            )
        return self.distinct(pages)

    def distinct(self, pages: Pages) -> Pages:
        """`pages` without page 0 and without repeats, in the order of first mention."""
        if len(pages) == 0:
            return pages
        if pages.min() < 0 or pages.max() >= self._virtual_pages:
            bad = pages[(pages < 0) | (pages >= self._virtual_pages)][0]
            raise AllocatorError(
                f"{self._name}: an id lies in page {bad}, outside [0, {self._virtual_pages}).",
                fix="Pass virtual token ids that alloc returned, not physical ones.",
            )
        if len(pages) > 1:
            keep = np.empty(len(pages), dtype=np.bool_)
            keep[0] = True
            np.not_equal(pages[1:], pages[:-1], out=keep[1:])
            pages = pages[keep]
            order = np.arange(len(pages))
            # Written back to front, so that the first mention is the one that stays.
            self._marks[pages[::-1]] = order[::-1]
            pages = pages[self._marks[pages] == order]
        return pages if pages.all() else pages[pages != 0]

    def host(self, ids: Ids) -> Pages:
        """Ids of any shape as one row of int64 on the host.

        Raises
        ------
        AllocatorError
            They are not integers of 32 or 64 bits.
        """
        if isinstance(ids, torch.Tensor):
            if ids.numel() and ids.dtype not in (torch.int32, torch.int64):
                raise self._wrong_type(ids.dtype)
            # A tensor on the device has to come over first, which waits for it; alloc hands out host ids.
            found = ids.detach().cpu().numpy()
        else:
            try:
                found = np.asarray(ids)
            except (TypeError, ValueError) as error:  # rows of different lengths
                raise self._wrong_type(type(ids).__name__) from error
            if found.size and (found.dtype.kind != "i" or found.dtype.itemsize < 4):
                raise self._wrong_type(found.dtype)
        return found.reshape(-1).astype(np.int64, copy=False)

    def _wrong_type(self, dtype: object) -> AllocatorError:
        return AllocatorError(f"{self._name}: ids of type {dtype}.", fix="Pass int64 (or int32) token ids.")


def tokens_of(pages: Pages, page_size: int) -> Pages:
    """Every token id of pages, page after page."""
    if page_size == 1:
        return pages
    return (pages[:, None] * page_size + np.arange(page_size, dtype=np.int64)).reshape(-1)


def count_of(need_size: int, page_size: int, name: str) -> int:
    """Pages in `need_size` tokens.

    Raises
    ------
    AllocatorError
        It is not a count, or not whole pages.
    """
    if isinstance(need_size, bool) or not isinstance(need_size, (int, np.integer)) or need_size < 0:
        raise AllocatorError(f"{name}: {need_size!r} tokens were asked for.", fix="Ask for 0 or more.")
    if need_size % page_size:
        raise AllocatorError(
            f"{name}: {need_size} tokens were asked for, which are not whole pages of {page_size}.",
            fix=f"Round up to {-(-need_size // page_size) * page_size}.",
        )
    return int(need_size) // page_size
