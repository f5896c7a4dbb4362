"""Which pages each sequence holds, and how many bytes are promised to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.config import FULL, WINDOW, EngineConfig
from kvarena.plugin.engines.embedded.requests import Sequence

if TYPE_CHECKING:
    from kvarena.pool import UnifiedKVPool, UnifiedSWATokenToKVPoolAllocator

__all__ = ["PageBook", "TooLong"]


class TooLong(KvArenaError):
    """A prompt that this pool can never hold, or that the engine's context does not cover."""


class PageBook:
    """Gives pages of the pool to sequences and takes them back.

    A sequence is admitted only when all that it may grow to fits beside what was promised before,
    so a running sequence never has to give way to another.

    Parameters
    ----------
    config : EngineConfig
    pool : UnifiedKVPool
    allocator : UnifiedSWATokenToKVPoolAllocator
    """

    def __init__(
        self, config: EngineConfig, pool: UnifiedKVPool, allocator: UnifiedSWATokenToKVPoolAllocator
    ) -> None:
        self._config = config
        self._pool = pool
        self._allocator = allocator
        self._committed = 0

    @property
    def usable_bytes(self) -> int:
        """Bytes between the sink and the end of the last window page."""
        return self._usable_bytes(self._pool.total_bytes)

    def capacity_tokens(self) -> int:
        """The most tokens that a single sequence can have in this pool, context aside."""
        config = self._config
        full, window = config.page_bytes()
        pages = self.usable_bytes // (full + window)
        widest = config.window_pages + config.chunk_pages
        if pages >= widest:
            pages = (self.usable_bytes - widest * window) // full
        return int(pages) * config.page_size

    def fits(self, total_bytes: int) -> bool:
        """Whether a pool of that size could keep all that was promised."""
        return self._committed <= self._usable_bytes(total_bytes)

    def admit(self, sequence: Sequence, *, generates: bool) -> bool:
        """Set bytes aside for a sequence; False: not now.

        Parameters
        ----------
        sequence : Sequence
            If it generates here, its `most_new_tokens` is lowered to what can ever fit.
        generates : bool
            Whether its answer is generated here, or only its prompt computed.

        Raises
        ------
        TooLong
            The prompt alone does not fit, however long one waits.
        """
        capacity = self.capacity_tokens()
        maximum = min(capacity, self._config.context_length)
        prompt = sequence.prompt_length
        if prompt > maximum:
            what = "the pool" if maximum == capacity else "a sequence of this engine"
            raise TooLong(
                f"the prompt has {prompt} tokens, {what} holds {maximum}.",
                fix="Send a shorter prompt, or give the pool more memory.",
            )
        tokens = prompt
        if generates:
            # The last generated token needs no KV.
            sequence.max_new_tokens = min(sequence.request.max_new_tokens, maximum - prompt + 1)
            tokens += sequence.max_new_tokens - 1
        needed = self._config.sequence_bytes(tokens)
        if self._committed + needed > self.usable_bytes:
            return False
        sequence.committed_bytes = needed
        self._committed += needed
        return True

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        """Give an admitted sequence pages for so many tokens in all; False: the pool has none."""
        missing = self._config.pages_of(tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        ids = self._allocator.alloc(missing * self._config.page_size)
        if ids is None:
            return False
        sequence.pages += self._pages(ids)
        return True

    def hold(self, sequence: Sequence) -> bool:
        """Give an admitted sequence the pages that its prompt, computed elsewhere, ends with; False: not now.

        Window pages are taken only where the next token can see them.
        """
        size = self._config.page_size
        pages = self._config.pages_of(sequence.prompt_length)
        first = min(self._config.first_window_page(sequence.prompt_length), pages)
        ids = self._allocator.alloc(pages * size, swa_tail_len=(pages - first) * size)
        if ids is None:
            return False
        sequence.pages = self._pages(ids)
        sequence.window_start = first
        return True

    def trim(self, sequence: Sequence, position: int) -> None:
        """Let go of the window pages that no token from `position` on can see."""
        first = min(self._config.first_window_page(position), len(sequence.pages))
        gone = sequence.pages[sequence.window_start : first]
        if gone:
            self._allocator.free_swa(self._ids(gone))
            sequence.window_start = first

    def release(self, sequence: Sequence) -> None:
        """Take back everything that a sequence holds; a second call does nothing."""
        self.unpin(sequence)
        if sequence.pages:
            self._allocator.free(self._ids(sequence.pages))
        sequence.pages, sequence.window_start = [], 0
        self._committed -= sequence.committed_bytes
        sequence.committed_bytes = 0

    def pin(self, sequence: Sequence) -> None:
        """Keep a sequence's pages where they are, while a transfer reads or writes them."""
        if not sequence.pinned:
            self._allocator.pin(self._ids(sequence.pages))
            sequence.pinned = True

    def unpin(self, sequence: Sequence) -> None:
        """The transfer has ended."""
        if sequence.pinned:
            self._allocator.unpin(self._ids(sequence.pages))
            sequence.pinned = False

    def physical_pages(self, sequence: Sequence) -> dict[str, list[int]]:
        """Where a sequence's pages lie now; of the window layers', only those still held."""
        held: list[tuple[str, Literal["full", "swa"], list[int]]] = [
            (FULL, "full", sequence.pages),
            (WINDOW, "swa", sequence.pages[sequence.window_start :]),
        ]
        return {
            name: self._allocator.transfer_pages(self._ids(pages), which).tolist() if pages else []
            for name, which, pages in held
        }

    def leaks(self) -> list[str]:
        """What is missing from an idle pool, and what the allocators' own books complain of."""
        allocator = self._allocator
        problems = list(allocator.verify_byte_accounting())
        for name, available, size in (
            (FULL, allocator.full_available_size(), allocator.size_full),
            (WINDOW, allocator.swa_available_size(), allocator.size_swa),
        ):
            if available != size:
                problems.append(f"{name}: {available} slots are available of {size}, though nothing runs")
        if self._committed:
            problems.append(f"{self._committed} bytes are still set aside, though nothing runs")
        return problems

    def _usable_bytes(self, total_bytes: int) -> int:
        pool = self._pool
        start = pool.min_page_index(FULL) * pool.page_bytes(FULL)
        window = pool.page_bytes(WINDOW)
        return max(0, total_bytes // window * window - start)

    def _ids(self, pages: list[int]) -> torch.Tensor:
        """Token ids of virtual pages, on the host, where the allocator takes them without waiting."""
        size = self._config.page_size
        starts = torch.tensor(pages, dtype=torch.int64) * size
        return (starts[:, None] + torch.arange(size)).flatten()

    def _pages(self, ids: torch.Tensor) -> list[int]:
        size = self._config.page_size
        pages: list[int] = (ids[::size] // size).tolist()
        return pages
