"""Kinds of values that several commands take on their command lines."""

from __future__ import annotations

import argparse
import re
from typing import Final

__all__ = ["DEVICE", "device"]

DEVICE: Final = re.compile(r"cpu|cuda(:\d+)?")
"""How a device is named: PyTorch's names, of those that kvarena can use."""


def device(text: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:<index>``; an error for `argparse` otherwise."""
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: give cpu, cuda or cuda:<index>")
    return text
