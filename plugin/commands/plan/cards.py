"""Memory of common cards, in MiB as ``nvidia-smi`` reports it: the figure that SGLang starts from."""

from __future__ import annotations

from kvarena.plugin.byte_sizes import MIB, parse_bytes

__all__ = ["CARDS", "card_bytes"]

CARDS = {
    "a10g": 23_028,
    "a100-40gb": 40_960,
    "a100-80gb": 81_920,
    "b200": 183_359,
    "h20": 97_871,
    "h100": 81_559,
    "h200": 143_771,
    "l4": 23_034,
    "l40s": 46_068,
    "rtx4090": 24_564,
    "t4": 15_360,
}


def card_bytes(text: str) -> int:
    """Bytes of a card, by its name or its size. Raises `InvalidSizeError`."""
    named = CARDS.get(text.strip().lower())
    return named * MIB if named is not None else parse_bytes(text, what="--gpu-memory", zero=False)
