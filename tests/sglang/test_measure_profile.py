"""Kept measurements: for one server alone, and refused by name when not to be trusted. Needs no SGLang."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvarena.plugin.engines.sglang.measure.errors import ProfileError
from kvarena.plugin.engines.sglang.measure.profile import Profile, ProfileStore, flags_of
from kvarena.plugin.engines.sglang.measure.steps import StepShape
from kvarena.pool.reserve import MeasuredStep

GIB = 1 << 30
KEY = {"release": "0.5.23", "card": "NVIDIA H200 150754820096", "--chunked_prefill_size": "8192"}
STEPS = [MeasuredStep("prefill", 2 * GIB), MeasuredStep("decode", 6 * GIB, 4096)]
SHAPES = [StepShape("prefill", "extend", 1, 8192), StepShape("decode", "decode", 4096, requests=4096)]


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "profiles")


@pytest.fixture
def kept(store: ProfileStore) -> Path:
    return store.save(Profile.of(KEY, STEPS, 7))


def load(store: ProfileStore, key: dict[str, str] = KEY) -> Profile | None:
    return store.load(key, SHAPES, 140 * GIB)


def test_a_measurement_comes_back_as_it_was_kept(store: ProfileStore, kept: Path) -> None:
    found = load(store)
    assert found is not None
    assert found.measured() == STEPS
    assert found.unseen_bytes == 7
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_there_may_be_none(store: ProfileStore, kept: Path, tmp_path: Path) -> None:
    assert load(ProfileStore(tmp_path / "nowhere")) is None
    assert load(store, KEY | {"card": "NVIDIA H100"}) is None


@pytest.mark.parametrize("name", sorted(KEY))
def test_a_file_of_another_server_under_this_ones_name_is_refused_by_what_differs(
    store: ProfileStore, kept: Path, name: str
) -> None:
    other = KEY | {name: "another"}
    kept.rename(store.path_of(other))
    with pytest.raises(ProfileError, match=f"another server: {name} differ"):
        load(store, other)


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_file_that_is_cut_off_is_refused_by_name(store: ProfileStore, kept: Path, length: int) -> None:
    kept.write_bytes(kept.read_bytes()[:length])
    with pytest.raises(ProfileError, match="cut off") as refused:
        load(store)
    assert str(kept) in str(refused.value)


def change(path: Path, **changes: Any) -> None:
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | changes))


def test_a_file_that_was_changed_is_refused(store: ProfileStore, kept: Path) -> None:
    change(kept, unseen_bytes=8)
    with pytest.raises(ProfileError, match="changed after it was written"):
        load(store)


@pytest.mark.parametrize(
    ("steps", "unseen", "why"),
    [
        ([MeasuredStep("prefill", 2 * GIB)], 0, "lacks"),
        ([*STEPS, MeasuredStep("other", 141 * GIB)], 0, "cannot give"),
        (STEPS, -1, "cannot give"),
    ],
)
def test_a_forged_file_says_what_cannot_be(
    store: ProfileStore, steps: list[MeasuredStep], unseen: int, why: str
) -> None:
    store.save(Profile.of(KEY, steps, unseen))
    with pytest.raises(ProfileError, match=why):
        load(store)


def test_another_format_is_refused(store: ProfileStore, kept: Path) -> None:
    change(kept, format=99)
    with pytest.raises(ProfileError, match="format is 99"):
        load(store)


@pytest.mark.parametrize("contents", [b"[]", b"\xff\xfe", b'{"format": 1}', b"null"])
def test_what_is_no_profile_is_refused(store: ProfileStore, kept: Path, contents: bytes) -> None:
    kept.write_bytes(contents)
    with pytest.raises(ProfileError, match="not a profile"):
        load(store)


def test_a_directory_that_others_can_enter_is_refused(store: ProfileStore, kept: Path) -> None:
    kept.parent.chmod(0o755)
    with pytest.raises(ProfileError, match="0755"):
        load(store)
    with pytest.raises(ProfileError, match="KVARENA_PROFILE_DIR"):
        store.save(Profile.of(KEY, STEPS, 0))


def test_a_file_that_others_can_write_is_refused(store: ProfileStore, kept: Path) -> None:
    kept.chmod(0o622)
    with pytest.raises(ProfileError, match="others can write"):
        load(store)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(store: ProfileStore, kept: Path) -> None:
    os.chown(kept, 12345, 12345)
    with pytest.raises(ProfileError, match="belongs to user 12345"):
        load(store)


def test_a_link_and_a_pipe_are_refused(store: ProfileStore, kept: Path, tmp_path: Path) -> None:
    elsewhere = kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(elsewhere)
    with pytest.raises(ProfileError, match=kept.name):
        load(store)
    kept.unlink()
    os.mkfifo(kept, 0o600)
    with pytest.raises(ProfileError, match="not a file"):
        load(store)


def test_a_disk_that_takes_nothing_is_told_and_leaves_no_half(
    store: ProfileStore, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ProfileError, match="No space left"):
        store.save(Profile.of(KEY, STEPS, 99))
    assert kept.read_bytes() == before
    assert list(kept.parent.iterdir()) == [kept]


def test_flags_that_say_nothing_about_memory_do_not_count() -> None:
    given = {"chunked_prefill_size": 8192, "port": 30000, "random_seed": 1, "_resolved_overrides": []}
    assert flags_of(SimpleNamespace(**given)) == {"chunked_prefill_size": "8192"}
    assert flags_of(SimpleNamespace(resolved_dict=lambda: given)) == {"chunked_prefill_size": "8192"}
