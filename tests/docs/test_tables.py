"""The operator guide's tables say what the code says: settings, refusals, errors, metrics, log lines."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from doc_pages import ROOT, code_spans, table
from kvarena.errors import KvArenaError
from kvarena.plugin.config import Settings
from kvarena.plugin.lifecycle import PoolLifecycle
from kvarena.plugin.observe.metrics import LABELS, ArenaCollector
from kvarena.plugin.observe.status.model import EngineStatus, PoolLabels, PoolStatus, SubPoolStatus
from kvarena.plugin.observe.tally import Tally
from kvarena.plugin.observe.timeline import Event
from kvarena.pool import (
    MHASubPoolSpec,
    SizingRequest,
    UnifiedSWATokenToKVPoolAllocator,
    resize_for,
)
from kvarena.pool import refusals as pool_refusals
from kvarena.transfer.registration.traffic import Traffic

GUIDE = ROOT / "docs" / "operator.md"
CODE = ("errors", "hooks", "plugin", "pool", "transfer")


def test_every_setting_with_its_default() -> None:
    described = {code_spans(row[0])[0]: row[1].strip("`") for row in table(GUIDE, "variable")}
    actual = {}
    for name in Settings.__struct_fields__:
        default = getattr(Settings(), name)
        shown = (
            "none" if default in (None, ()) else str(int(default) if default in (True, False) else default)
        )
        actual[f"KVARENA_{name.upper()}"] = shown
    assert described == actual


def test_every_refusal_has_a_row() -> None:
    described = [code_spans(row[0])[0] for row in table(GUIDE, "code")]
    assert len(described) == len(set(described))
    assert set(described) == {check.code for check in pool_refusals._CHECKS} | set(_codes_in("plugin"))


def _codes_in(folder: str) -> Iterator[str]:
    """First arguments of ``Refusal(...)`` in a folder's source."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refusal" and node.args:
                assert isinstance(node.args[0], ast.Constant), f"{path}: a code that is no constant"
                yield str(node.args[0].value)


def test_every_public_error_has_a_row() -> None:
    described = [code_spans(row[0])[0] for row in table(GUIDE, "error")]
    assert len(described) == len(set(described))
    classes = []
    for name in described:
        module, _, attribute = name.rpartition(".")
        classes.append(getattr(importlib.import_module(module), attribute))
        assert attribute in importlib.import_module(module).__all__
    missing = _public_errors() - set(classes) - {KvArenaError}
    assert missing == set()


def _public_errors() -> set[type[KvArenaError]]:
    """Errors that a public module names in ``__all__``."""
    found = set()
    for folder in CODE:
        package = importlib.import_module(f"kvarena.{folder}")
        walked = pkgutil.walk_packages(package.__path__, f"kvarena.{folder}.")
        for name in [package.__name__, *(each.name for each in walked)]:
            private = any(part.startswith("_") for part in name.split("."))
            # The kernels need Triton, which only a GPU machine has; no error is defined there.
            if private or name.startswith("kvarena.transfer.same_host.copy."):
                continue
            module = importlib.import_module(name)
            for attribute in getattr(module, "__all__", ()):
                value = getattr(module, attribute)
                if isinstance(value, type) and issubclass(value, KvArenaError):
                    found.add(value)
    return found


def test_every_metric_has_its_type_and_labels() -> None:
    described = {
        code_spans(row[0])[0]: (row[1], tuple(filter(None, map(str.strip, row[2].split(",")))))
        for row in table(GUIDE, "metric")
    }
    sub_pool = SubPoolStatus(
        name="full",
        unit="tokens",
        grow_direction="up",
        page_bytes=1,
        slots_per_page=1,
        num_pages=1,
        live_pages=1,
        free_pages=0,
    )
    engine = EngineStatus(
        name="mooncake",
        registered_bytes=1,
        regions=((0, 1),),
        epoch=1,
        in_flight=0,
        transfer_seconds=Traffic().seconds,
        transfer_sizes=Traffic().sizes,
    )
    pool = PoolStatus(
        state="serving", tokens=1, requests=1, torch_cached_bytes=1, sub_pools=(sub_pool,), engines=(engine,)
    )
    events = [Event("refused", None, None, 0.0, 0.0, {"code": "efa"}), Event("finalized", 1, 0, 1.0, 0.0)]
    # Only where the figures come from is made up: every optional one is there.
    tally = Tally()
    for event in events:
        tally.add(event)
    reporter: Any = SimpleNamespace(pool_status=lambda: pool, tally=tally, labels=PoolLabels(), name="decode")
    actual = {}
    for metric in ArenaCollector(reporter).collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert metric.samples, f"{name} has no sample, so its labels are not known"
        labels = tuple(label for label in metric.samples[0].labels if label not in ("le", *LABELS))
        actual[name] = (metric.type, labels)
    assert described == actual


def test_every_event_is_in_the_table_of_log_lines() -> None:
    described = {name for row in table(GUIDE, "event") for name in code_spans(row[0])}
    assert described == set(_events())


def _events() -> Iterator[str]:
    """Names that are given to a timeline anywhere in the code."""
    for path in (ROOT / "plugin").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            if node.func.attr in ("add", "timed") and ast.unparse(node.func.value).endswith("timeline"):
                names = [each for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)]
                yield from (str(each.value) for each in names)
    yield from ("registered", "unregistered")  # passed on by name inside the SGLang adapter


def test_the_keys_of_log_lines_are_those_of_the_table(caplog: pytest.LogCaptureFixture) -> None:
    described = {
        name: set(code_spans(row[2])) for row in table(GUIDE, "event") for name in code_spans(row[0])
    }
    caplog.set_level("INFO", logger="kvarena")
    for name, keys in _lines_of_a_life(caplog):
        assert keys - {"bytes", "address", "ms"} <= described[name], name
        seen = described.setdefault("", set())
        seen.add(name)
    assert described[""] >= {
        "refused",
        "reserved",
        "sink",
        "budget",
        "finalized",
        "registered",
        "grown",
        "closed",
    }


def _lines_of_a_life(caplog: pytest.LogCaptureFixture) -> Iterator[tuple[str, set[str]]]:
    settings = Settings(memory_limit=8 << 20, pool_bytes=2 << 20, status=False, load_plugins=False)
    settings = msgspec.structs.replace(settings, transfer=("same-host",))
    specs = [
        MHASubPoolSpec(name, direction, layer_num=2, head_num=2, head_dim=16, dtype=torch.float32)
        for name, direction in (("full", "up"), ("swa", "down"))
    ]
    life = PoolLifecycle(settings, device="cpu", name="logs")
    assert life.plan(SizingRequest(enabled=False, driver="host", device="cpu"))
    life.reserve(specs, total_bytes=4 << 20, page_size=16)
    allocator = UnifiedSWATokenToKVPoolAllocator(life.pool)
    life.finalize(resize_for(life.pool, life.budget()), allocator)
    life.grow(3 << 20, allocator)
    life.shrink(2 << 20, allocator)
    life.close()
    for record in caplog.records:
        if record.name != "kvarena":
            continue
        _, _, line = record.getMessage().partition("kvarena: ")
        before, equals, _ = line.partition("=")
        name = before.rpartition(" ")[0] if equals else line
        quoted = ast.literal_eval  # values with spaces are in double quotes
        keys, rest = set(), line[len(name) :].strip()
        while rest:
            key, _, rest = rest.partition("=")
            keys.add(key)
            if rest.startswith('"'):
                end = rest.index('"', 1) + 1
                assert quoted(rest[:end])
                rest = rest[end:].strip()
            else:
                _, _, rest = rest.partition(" ")
        yield name, keys


def test_the_worked_example_names_files_that_exist() -> None:
    page = ROOT / "docs" / "engines" / "embedded.md"
    named = [span for row in table(page, "you write") for span in code_spans(row[1])]
    assert len(named) > 5
    assert [name for name in named if not (ROOT / "plugin/engines/embedded" / name).exists()] == []


def test_the_guide_to_transfer_tests_names_every_fixture_and_attribute() -> None:
    page = ROOT / "docs" / "transfer-tests.md"
    from kvarena.pool.testing import pytest_plugin as of_pools
    from kvarena.transfer import Capabilities, TransferEngine
    from kvarena.transfer.testing import TransferEngineContract, pytest_plugin

    def named(header: str) -> set[str]:
        return {span.partition("(")[0] for row in table(page, header) for span in code_spans(row[0])}

    # The contract's own fixture is nobody else's business.
    assert named("fixture") == {*pytest_plugin.__all__, *of_pools.__all__} - {"kvarena_sides"}
    attributes = {
        name for each in TransferEngineContract.__mro__ for name in vars(each).get("__annotations__", ())
    }
    assert named("attribute") == attributes
    assert named("capability") == set(Capabilities.__dataclass_fields__)
    members = {name for name in vars(TransferEngine) if not name.startswith("_")}
    assert named("member") == members


def test_paths_that_pages_name_exist() -> None:
    named = {
        span
        for page in (ROOT / "docs").rglob("*.md")
        for row in page.read_text().splitlines()
        for span in code_spans(row)
        if span.startswith(("plugin/", "tests/", "bench/", "tools/", "hooks/", "pool/", "transfer/"))
    }
    assert named
    places = (ROOT, ROOT / "tests" / "transfer" / "example_engine")
    assert [span for span in named if not any((place / span).exists() for place in places)] == []
