"""One parser and one formatter of sizes: settings and commands accept and print the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvarena.plugin.byte_sizes import GIB, KIB, MAX_BYTES, MIB, InvalidSizeError, format_bytes, parse_bytes
from kvarena.plugin.config import ConfigError, load_settings

SIZES = [
    ("0", 0),
    (17, 17),
    ("10B", 10),
    ("64KiB", 65536),
    ("1.5 GiB", 3 << 29),
    ("2tib", 2 << 40),
    ("1GB", 10**9),
    ("1gb", 10**9),
    ("250 MB", 250 * 10**6),
    ("16G", 16 * GIB),
    ("143_771 MiB", 143_771 * MIB),
    (str(MAX_BYTES - 1), MAX_BYTES - 1),
]
NO_SIZES = [
    "",
    " ",
    "-1",
    -1,
    "1XB",
    "GiB",
    "1e400",
    "inf",
    "nan",
    True,
    None,
    [],
    1.5,
    "1 2",
    "1.",
    "\u0661GiB",
]


@pytest.mark.parametrize(("text", "size"), SIZES)
def test_a_size_is_read(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_not_a_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(InvalidSizeError, match=r"^--headroom: .* is not a valid size\."):
        parse_bytes(text, what="--headroom")


@pytest.mark.parametrize("text", ["9" * 30, "9" * 400, 10**400, "1048577 TiB", "2000000TB"])
def test_more_than_any_machine_has_is_refused(text: object) -> None:
    with pytest.raises(InvalidSizeError, match=f"more than {MAX_BYTES} bytes") as refused:
        parse_bytes(text)
    assert len(str(refused.value)) < 200


def test_a_number_that_python_does_not_print_is_refused() -> None:
    with pytest.raises(InvalidSizeError, match="a number of many digits is more than"):
        parse_bytes(10**5000)


def test_zero_is_refused_where_it_is_not_an_answer() -> None:
    with pytest.raises(InvalidSizeError, match="'0' is not positive"):
        parse_bytes("0", zero=False)


@pytest.mark.parametrize(("text", "size"), [case for case in SIZES if isinstance(case[0], str)])
def test_settings_and_commands_read_the_same(text: str, size: int) -> None:
    assert load_settings({"KVARENA_HEADROOM": text}).headroom == size


def test_a_setting_that_is_not_a_size_names_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"headroom \(KVARENA_HEADROOM\): '8 parsecs' is not a valid size"):
        load_settings({"KVARENA_HEADROOM": "8 parsecs"})


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (KIB, "1.00 KiB"), (145_567_514_624, "135.57 GiB"), (3 << 40, "3.00 TiB")],
)
def test_a_size_is_printed_in_its_largest_unit(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_what_is_printed_is_read_back_to_its_last_digit(nbytes: int) -> None:
    read = parse_bytes(format_bytes(nbytes).replace(",", ""))
    assert abs(read - nbytes) <= max(nbytes // 200, 0) + 1


def test_status_and_doctor_print_with_the_one_formatter() -> None:
    from kvarena.plugin.commands.doctor import device
    from kvarena.plugin.commands.plan import render
    from kvarena.plugin.commands.status import view

    used: list[Callable[[int], str]] = [device.format_bytes, render.format_bytes, view.format_bytes]
    assert all(function is format_bytes for function in used)
