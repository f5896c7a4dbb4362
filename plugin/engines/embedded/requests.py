"""A request on its way through the engine."""

from __future__ import annotations

from typing import Literal

import msgspec
from kvarena.plugin.engines.embedded.config import BOS, EOS, VOCABULARY

__all__ = ["Request", "Result", "Sequence", "prompt_tokens"]


class Request(msgspec.Struct, frozen=True):
    """What a client asks for."""

    rid: int
    tokens: list[int]
    max_new_tokens: int

    def problem(self) -> str:
        """Why it makes no sense, whatever the pool; empty if it does."""
        if not self.tokens:
            return "a request needs a prompt."
        if self.max_new_tokens < 1:
            return f"max_new_tokens is {self.max_new_tokens}, it must be at least 1."
        odd = next((token for token in self.tokens if not 0 <= token < VOCABULARY), None)
        return "" if odd is None else f"token {odd} is not in the vocabulary of {VOCABULARY}."


class Result(msgspec.Struct, frozen=True):
    """What a client gets."""

    rid: int
    tokens: list[int]
    reason: Literal["eos", "length", "error"]
    error: str = ""
    logits: list[float] = []
    """The logit of each chosen token, by which two runs' rounding can be compared."""
    margin: float | None = None
    """The least distance from a chosen token's logit to the next best one's; None without tokens."""


class Sequence:
    """A request's tokens and pages in one process.

    Parameters
    ----------
    request : Request
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.max_new_tokens = request.max_new_tokens
        """What the request asks for, or less where the pool holds less."""
        self.generated: list[int] = []
        self.logits: list[float] = []
        self.margin: float | None = None
        self.pages: list[int] = []
        """Virtual pages, from the start of the sequence."""
        self.window_start = 0
        """Index in `pages` of the first one whose window half is still held."""
        self.committed_bytes = 0
        """What the pages may grow to; set aside at admission."""
        self.pinned = False

    @property
    def rid(self) -> int:
        """The request's id."""
        return self.request.rid

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    @property
    def position(self) -> int:
        """Position of the last generated token, whose KV the next decode step computes."""
        return self.prompt_length + len(self.generated) - 1

    @property
    def finished(self) -> bool:
        """Whether no further token is to come."""
        return len(self.generated) >= self.max_new_tokens or self.generated[-1:] == [EOS]

    def append(self, token: int, logit: float, margin: float) -> None:
        """Take a generated token."""
        self.generated.append(token)
        self.logits.append(logit)
        self.margin = margin if self.margin is None else min(self.margin, margin)

    def result(self) -> Result:
        """The client's answer, once finished."""
        reason: Literal["eos", "length"] = "eos" if self.generated[-1:] == [EOS] else "length"
        return Result(self.rid, self.generated, reason, logits=self.logits, margin=self.margin)


def prompt_tokens(text: bytes) -> list[int]:
    """A text's tokens: one for the beginning, then one for each byte."""
    return [BOS, *text]
