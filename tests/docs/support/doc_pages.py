"""Reads the documentation as its readers do: blocks, commands, tables, links, anchors."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^( *)```(\w*) *(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command line of a page."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:100]}"


def name_of(page: Path) -> str:
    """As the tests call a page."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, those in lists too."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        _, language, info, body = found.groups()
        title = re.search(r'title="([^"]+)"', info)
        line = text.count("\n", 0, found.start()) + 1
        yield Block(name_of(page), line, language, title[1] if title else "", textwrap.dedent(body))


def commands(page: Path) -> Iterator[Command]:
    """Every command of a page's shell blocks: what follows a prompt, or every line where there is none."""
    for block in blocks(page):
        if block.language not in ("console", "bash", "sh", "shell"):
            continue
        lines = block.text.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        for line in prompted or lines:
            text = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            if text:
                yield Command(block.page, text)


def prose(page: Path) -> str:
    """A page without its blocks and its code spans."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))


def links(page: Path) -> Iterator[str]:
    """Every link of a page to a file of ours."""
    # Link texts may have code in them, so only the blocks are left out.
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings that GitHub and mkdocs agree on."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings]
    return {_github(heading) for heading in plain} & {_mkdocs(heading) for heading in plain}


def table(page: Path, header: str) -> list[list[str]]:
    """The rows of every table of a page whose first column has this header."""
    rows, inside = [], False
    for line in page.read_text().splitlines():
        if not line.lstrip().startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if cells[0] == header:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            rows.append(cells)
    return rows


def code_spans(cell: str) -> list[str]:
    """What a cell has between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def _github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _mkdocs(heading: str) -> str:
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())
