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
    the error, and once more when the group ends, before anything is freed.
    """

    def __init__(self) -> None:
        self._group: list[Pages] | None = None

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
            No group is open, or a page was freed or pinned meanwhile; the group stays open then.
        """
        if self._group is None:
            raise AllocatorError("No group of frees is open.", fix="Call free_group_begin() first.")
        if self._group:
            pages = np.concatenate(self._group)
            _, first = np.unique(pages, return_index=True)
            self._release(self._check_free(pages[np.sort(first)]))
        self._group = None

    def _free_or_defer(self, pages: Pages) -> None:
        pages = self._check_free(pages)
        if self._group is None:
            self._release(pages)
        elif len(pages):
            self._group.append(pages)

    def _drop_group(self) -> None:
        self._group = None

    @abstractmethod
    def _check_free(self, pages: Pages) -> Pages:
        """Those of distinct pages that there is something to free of; raises for a wrong one."""

    @abstractmethod
    def _release(self, pages: Pages) -> None:
        """Free distinct pages that were checked."""
