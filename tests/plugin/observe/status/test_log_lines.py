"""One line for each decision, with stable keys, and nothing else at INFO."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from kvarena.pool import SizingRequest

MIB = 1 << 20


def _lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_life_in_the_log(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = serve(transfer=("mooncake",), headroom=MIB, status=False)
    lifecycle = served.lifecycle
    lifecycle.timeline.add("captured", how="plain", steps=3)
    lifecycle.budget()
    served.finalize(4 * MIB)
    lifecycle.grow(6 * MIB, served.allocator)
    lifecycle.shrink(4 * MIB, served.allocator)
    lifecycle.close()
    address = r"address=0x[0-9a-f]+"
    expected = [
        rf"reserved bytes={8 * MIB} {address}",
        rf"sink bytes=\d+ {address}",
        rf"registered bytes=\d+ {address} engine=mooncake regions=1 epoch=1",
        r"captured how=plain steps=3",
        rf"budget bytes=\d+ free=\d+ minus_headroom={MIB} torch_cache_released=0",
        r"captured how=plain",
        rf"finalized bytes={4 * MIB} {address}",
        rf"registered bytes={4 * MIB} {address} engine=mooncake regions=1 epoch=3",
        rf"grown bytes={6 * MIB} {address}",
        rf"registered bytes={6 * MIB} {address} engine=mooncake regions=2 epoch=4",
        rf"registered bytes={4 * MIB} {address} engine=mooncake regions=1 epoch=5",
        rf"shrunk bytes={4 * MIB} {address}",
        r"closed",
    ]
    lines = _lines(caplog, logging.INFO)
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        # What is not timed has no figure: 0.000 would read as one.
        took = "" if pattern.split()[0] in ("sink", "captured", "closed") else r" ms=\d+\.\d{3}"
        assert re.fullmatch(f"kvarena: {pattern}{took}", line), (line, pattern)


def test_a_refusal_is_one_warning_with_its_setting(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = serve(status=False)
    caplog.clear()
    request = SizingRequest(
        enabled=False, driver="host", prefill_captured_sizes=(8,), chunked_prefill_size=8, ray=True
    )
    served.lifecycle.plan(request)
    warnings = _lines(caplog, logging.WARNING)
    assert [re.match(r"kvarena: refused code=(\w+) setting=(\w+) reason=\"[^\"]+\"$", line) is not None
            for line in warnings] == [True, True]  # fmt: skip
    assert "code=disabled" in warnings[0]
    assert "code=ray" in warnings[1]
    assert _lines(caplog, logging.INFO) == []
