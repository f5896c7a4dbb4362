"""What several commands accept on their command lines."""

from __future__ import annotations

import argparse

from kvarena.plugin.config import DEVICE

__all__ = ["device"]


def device(text: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:<index>``; an error for `argparse` otherwise."""
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device: give cpu, cuda or cuda:<index>")
    return text
