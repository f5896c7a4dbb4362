"""Comparing memory: exact, and short however much differs."""

from __future__ import annotations

import pytest
from kvarena.transfer.testing import assert_same_bytes


@pytest.mark.parametrize("same", [b"", b"\x00", bytes(range(256)) * 4096])
def test_what_is_equal_passes(same: bytes) -> None:
    assert_same_bytes(bytes(bytearray(same)), same)


def test_one_byte_of_a_mebibyte_is_found() -> None:
    expected = bytes(range(256)) * 4096
    actual = bytearray(expected)
    actual[777_777] ^= 1
    with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 1048576(.|\n)*\[777777\]"):
        assert_same_bytes(bytes(actual), expected)


@pytest.mark.parametrize("other", [b"", b"a", b"aab"])
def test_another_length_is_a_difference(other: bytes) -> None:
    """One byte too: an array of one element is no scalar, with which all would be compared."""
    with pytest.raises(AssertionError, match="mismatch"):
        assert_same_bytes(other, b"aa")


def test_a_difference_in_every_byte_is_told_in_a_few_lines() -> None:
    with pytest.raises(AssertionError) as differs:
        assert_same_bytes(bytes(1 << 20), b"\x01" * (1 << 20))
    assert len(str(differs.value)) < 1000
