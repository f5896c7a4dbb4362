"""Settings: environment before file before default, and nothing unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvarena.plugin.config import ConfigError, Settings, load_settings, parse_bytes


def test_defaults() -> None:
    assert load_settings({}) == Settings()
    assert not Settings().enable


def test_environment_before_file_before_default(tmp_path: Path) -> None:
    file = tmp_path / "kvarena.toml"
    file.write_text('memory_limit = "1GiB"\nheadroom = 5\ntransfer = ["nixl"]\n')
    settings = load_settings({"KVARENA_CONFIG": str(file), "KVARENA_HEADROOM": "7", "KVARENA_ENABLE": "1"})
    assert (settings.memory_limit, settings.headroom, settings.transfer) == (1 << 30, 7, ("nixl",))
    assert settings.enable
    assert settings.transfer_timeout == Settings().transfer_timeout


def test_an_empty_variable_is_no_setting() -> None:
    assert load_settings({"KVARENA_HEADROOM": "", "KVARENA_TRANSFER": ""}) == Settings()


def test_lists_are_split_at_commas() -> None:
    assert load_settings({"KVARENA_TRANSFER": " mooncake, nixl ,"}).transfer == ("mooncake", "nixl")


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"KVARENA_FOO": "1"}, "KVARENA_FOO"),
        ({"KVARENA_METRICS_PORT": "99999"}, "KVARENA_METRICS_PORT"),
        ({"KVARENA_HEADROOM": "-1"}, "KVARENA_HEADROOM"),
        ({"KVARENA_HEADROOM": "much"}, "KVARENA_HEADROOM"),
        ({"KVARENA_ENABLE": "maybe"}, "KVARENA_ENABLE"),
        ({"KVARENA_TRANSFER_TIMEOUT": "0"}, "KVARENA_TRANSFER_TIMEOUT"),
        ({"KVARENA_MEMORY_LIMIT": "nan"}, "KVARENA_MEMORY_LIMIT"),
        ({"KVARENA_CONFIG": "/no/such/file.toml"}, "/no/such/file.toml"),
    ],
)
def test_a_bad_setting_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as info:
        load_settings(environ)
    assert named in str(info.value)


@pytest.mark.parametrize("text", ["colour = 1\n", "[a]\nb = 1\n", "headroom = \n", "\xff\xfe"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_settings({}, path=file)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), (17, 17), ("64KiB", 65536), ("1.5 GiB", 3 << 29), ("2tib", 2 << 40), ("10B", 10)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1XB", "GiB", "1e400", "inf", True, None, [], "1 2"])
def test_no_sizes(text: object) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_bytes(text)
