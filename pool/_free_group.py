"""Frees that are collected and take effect together."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from kvarena.pool._free_pages import Pages
from kvarena.pool.errors import AllocatorError

__all__ = ["FreeGroup"]


class FreeGroup(ABC):
    """``free_group_begin`` and ``free_group_end`` around calls that free.

    Every call is checked when it is made, so that the caller at fault gets
    the error, and once more when the group ends, before anything is freed: a
    page that was freed outside of the group meanwhile may belong to another
    request by then, which its generation tells.
    """

    def __init__(self) -> None:
        self._group: list[tuple[Pages, Pages]] | None = None  # pages, and their generations then

    def free_group_begin(self) -> None:
        """Collect what is freed from now on, until `free_group_end`.

        Raises
        ------
        AllocatorError
            A group is open already.
        """
        if self._group is not None:
            raise AllocatorError("A group of frees is open already.", fix="Call free_group_end() first.")
        self._group = []

    def free_group_end(self) -> None:
        """Free what was collected; a page that several calls named is freed once.

        Raises
        ------
        AllocatorError
            No group is open, or a page was freed outside of the group, or pinned,
            meanwhile. Nothing is freed then, and the group stays open: with the
            pinned pages, without those that were freed.
        """
        if self._group is None:
            raise AllocatorError("No group of frees is open.", fix="Call free_group_begin() first.")
        if self._group:
            pages, generations = (np.concatenate(column) for column in zip(*self._group, strict=True))
            fresh = self._generations()[pages] == generations
            if not fresh.all():
                self._group = [(pages[fresh], generations[fresh])]
                raise AllocatorError(
                    f"{int((~fresh).sum())} pages of the group were freed outside of it since, the first is "
                    f"virtual page {pages[~fresh][0]}: by now they may belong to another request.",
                    fix="Free each page once. Call free_group_end() again to free the others.",
                )
            _, first = np.unique(pages, return_index=True)
            self._release(self._check_free(pages[np.sort(first)]))
        self._group = None

    def _free_or_defer(self, pages: Pages) -> None:
        pages = self._check_free(pages)
        if self._group is None:
            self._release(pages)
        elif len(pages):
            self._group.append((pages, self._generations()[pages]))

    def _drop_group(self) -> None:
        self._group = None

    @abstractmethod
    def _generations(self) -> Pages:
        """How often each virtual page was freed so far."""

    @abstractmethod
    def _check_free(self, pages: Pages) -> Pages:
        """Those of distinct pages that there is something to free of; raises for a wrong one."""

    @abstractmethod
    def _release(self, pages: Pages) -> None:
        """Free distinct pages that were checked."""
