"""Python on the pages compiles, imports what exists, and the worked examples run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable

import pytest
from doc_pages import PAGES, ROOT, Block, blocks

#: Modules that a reader writes.
READERS_OWN = {"my_package"}
EXAMPLE_ENGINE = ROOT / "tests" / "transfer" / "example_engine"

PYTHON = [block for page in PAGES for block in blocks(page) if block.language in ("python", "py")]


@pytest.fixture
def example_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third party's engine, importable."""
    monkeypatch.syspath_prepend(str(EXAMPLE_ENGINE))


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_block_compiles_and_its_imports_resolve(block: Block, example_engine: None) -> None:
    tree = ast.parse(block.text, str(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [(name.name, None) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            wanted = [(node.module or "", name.name) for name in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] in READERS_OWN:
                continue
            if name is None or module.partition(".")[0] not in ("kvarena", "kvarena_example_engine"):
                assert importlib.util.find_spec(module.partition(".")[0]), f"{block}: {module}"
                continue
            found = importlib.import_module(module)
            if not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")


def test_the_readmes_engine_runs() -> None:
    import torch
    from kvarena.pool import MHASubPoolSpec

    (block,) = (each for each in PYTHON if each.page == "README.md")
    specs = [
        MHASubPoolSpec(name, direction, layer_num=2, head_num=2, head_dim=16, dtype=torch.float32)
        for name, direction in (("full", "up"), ("swa", "down"))
    ]
    captured: list[int] = []
    names = {
        "specs": specs,
        "upper_bound": 2 << 20,
        "capture_graphs": lambda pool: captured.append(pool.arena.backed_bytes),
    }
    source = block.text.replace('"cuda"', '"cpu"')
    exec(compile(source, str(block), "exec"), names)
    pool = names["pool"]
    assert captured == [pool.sink_bytes]
    assert pool.total_bytes == 2 << 20
    names["life"].close()


@pytest.mark.parametrize("title", ["engine.py", "watcher.py"])
def test_a_worked_example_runs(title: str, ended: Callable[[str], tuple[int, str, str]]) -> None:
    status, _, err = ended(title)
    assert status == 0, err[-4000:]


def test_the_pair_of_the_page_answers(ended: Callable[[str], tuple[int, str, str]]) -> None:
    status, out, err = ended("client.py")
    assert status == 0, err[-4000:]
    assert "Result(rid=0" in out
    assert "error=''" in out


def test_the_guides_contract_is_the_examples() -> None:
    page = "docs/transfer-tests.md"
    shown = "\n".join(block.text for block in PYTHON if block.page == page)
    contract = (EXAMPLE_ENGINE / "tests" / "test_contract.py").read_text().partition("from kvarena")[2]
    for line in contract.splitlines()[1:]:
        assert line in shown, line
