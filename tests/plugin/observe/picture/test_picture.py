"""The picture says what the history says; what cannot be drawn is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvarena.plugin.observe.picture import PictureError, draw_arena
from kvarena.plugin.observe.status.model import ArenaHistory, EventMark, Sample

pytest.importorskip("matplotlib", reason="pip install kvarena[plot]")

MIB = 1 << 20


def _history(**changes: object) -> ArenaHistory:
    handles = ((4096,), (8 * MIB,), (8 * MIB, 4 * MIB), (8 * MIB,))
    fields = {
        "title": "decode",
        "began_at": 1000.0,
        "reserved_bytes": 16 * MIB,
        "sink_bytes": 4096,
        "sub_pools": (("full", "up"), ("middle", "float"), ("swa", "down")),
        "samples": [
            Sample(float(at), sum(sizes), sum(sizes), sum(sizes), sizes, (at * MIB, MIB, MIB))
            for at, sizes in enumerate(handles)
        ],
        "events": [
            EventMark(0.1, "reserved", 16 * MIB),
            EventMark(1.0, "captured"),
            EventMark(1.0, "finalized", 8 * MIB),
            EventMark(2.0, "grown", 12 * MIB),
            EventMark(3.0, "shrunk", 8 * MIB),
        ],
    } | changes
    return ArenaHistory(**fields)  # type: ignore[arg-type]


def test_the_words_of_a_life_are_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "arena.svg"
    draw_arena(_history(), path)
    text = path.read_text()
    # matplotlib writes each text as a comment before its glyphs.
    for words in (
        "decode: 16 MiB reserved, up to 12 MiB backed by 2 handles, up to 12 MiB registered",
        "full: live, grows up",
        "middle: live, floats",
        "swa: live, grows down",
        "sink, 4 KiB",
        "seam",
        "captured",
        "finalized to 8 MiB",
        "grown to 12 MiB",
        "given back to 8 MiB",
    ):
        assert f"<!-- {words}" in text, words
    assert "<!-- reserved 16" not in text  # no line of its own: the whole height says it


def test_several_processes_share_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "two.svg"
    draw_arena([_history(), _history(title="prefill", began_at=1002.0)], path)
    text = path.read_text()
    assert text.count("<!-- decode: 16 MiB reserved") == text.count("<!-- prefill: 16 MiB reserved") == 1
    assert text.count("<!-- backed: memory, free -->") == 1  # both have the same kinds: one legend


@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_other_formats(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"arena{suffix}"
    draw_arena(_history(), path)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"%PDF")


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": [Sample(0.0, 0, 0, 0, (), ())], "events": []},
        {"sub_pools": ()},
        {"samples": [Sample(5.0, MIB, MIB, 0, (MIB,), ())], "events": [EventMark(9.0, "grown", 1)]},
        {"reserved_bytes": 100, "sink_bytes": 1},
    ],
    ids=["no memory at all", "no sub-pools", "one moment", "a few bytes"],
)
def test_a_poor_history_is_drawn_all_the_same(tmp_path: Path, changes: dict[str, object]) -> None:
    draw_arena(_history(**changes), tmp_path / "poor.png")
    assert (tmp_path / "poor.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "histories", "why"),
    [
        ("arena.xyz", 1, "no known picture format"),
        ("arena", 1, "no known picture format"),
        ("missing/arena.png", 1, "cannot be written"),
        ("arena.png", 0, "no sample"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, name: str, histories: int, why: str) -> None:
    with pytest.raises(PictureError, match=why):
        draw_arena([_history()] * histories, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PictureError, match=r"pip install 'kvarena\[plot\]'"):
        draw_arena(_history(), tmp_path / "arena.png")
