"""Links lead somewhere, and every page is in the navigation."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, anchors, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_has_a_target(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_pages_do_not_link_out_of_their_folder() -> None:
    # mkdocs has only the folder, so such a link would be dead on the site.
    docs = ROOT / "docs"
    outside = [
        (name_of(page), link)
        for page in docs.rglob("*.md")
        for link in links(page)
        if not (page.parent / link.partition("#")[0]).resolve().is_relative_to(docs)
    ]
    assert outside == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []
