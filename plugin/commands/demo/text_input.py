"""The demo's text: read, checked, and cut into prompts of different lengths."""

from __future__ import annotations

import importlib.resources
import itertools
from pathlib import Path

from kvarena.errors import KvArenaError

__all__ = ["InputError", "cut_into_prompts", "read_text"]


class InputError(KvArenaError):
    """A text that cannot be served."""


def read_text(path: str | None, *, max_bytes: int) -> bytes:
    """Read a text file, or the passage that the package ships.

    Parameters
    ----------
    path : str or None
        None: the shipped passage.
    max_bytes : int
        The most that the pool could hold; nothing larger is read.

    Raises
    ------
    InputError
        The file is missing, unreadable, empty, binary or too large.
    """
    if path is None:
        return (
            importlib.resources.files("kvarena.plugin.engines.embedded").joinpath("passage.txt").read_bytes()
        )
    try:
        with Path(path).open("rb") as file:
            # A size is not asked for: a device or a pipe has none.
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise InputError(
            f"the input {path} cannot be read: {error.strerror}.", fix="Give a text file with --input."
        ) from error
    if not text:
        raise InputError(f"the input {path} is empty.", fix="Give a file with some text.")
    if len(text) > max_bytes:
        raise InputError(
            f"the input {path} is larger than the pool, which holds at most {max_bytes} bytes of text.",
            fix="Give a shorter file, or raise --memory-limit.",
        )
    if b"\0" in text:
        raise InputError(f"the input {path} is binary: it has NUL bytes.", fix="Give a text file.")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"the input {path} is not UTF-8 text: byte {error.start} is {text[error.start]:#04x}.",
            fix="Give a UTF-8 text file.",
        ) from error
    return text


def cut_into_prompts(text: bytes, count: int) -> list[bytes]:
    """Cut a whole text into consecutive parts, the n-th about as long as n squared.

    Raises
    ------
    InputError
        The text is too short for so many.
    """
    if count < 1:
        raise InputError(f"{count} requests were asked for.", fix="Give --requests 1 or more.")
    if len(text) < count:
        raise InputError(
            f"a text of {len(text)} bytes cannot be cut into {count} prompts.", fix="Lower --requests."
        )
    whole = sum(n * n for n in range(1, count + 1))
    cuts = [0]
    for n in range(1, count + 1):
        share = len(text) * sum(m * m for m in range(1, n + 1)) // whole
        # Every prompt has a byte, and leaves one for each that follows.
        cuts.append(min(max(share, cuts[-1] + 1), len(text) - (count - n)))
    return [text[start:end] for start, end in itertools.pairwise(cuts)]
