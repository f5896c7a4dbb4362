"""Settings: environment before file before default, and nothing unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvarena.plugin.config import ConfigError, Settings, load_settings


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
    ("environ", "said"),
    [
        # Others are named, too: a longer name is not taken for its beginning.
        (
            {"KVARENA_TRANSFER": "mooncake", "KVARENA_TRANSFER_TIMEOUT": "soon"},
            r"transfer_timeout is 'soon'.*Change KVARENA_TRANSFER_TIMEOUT\.$",
        ),
        ({"KVARENA_ENABLE": "yes"}, r"enable is 'yes'.*Change KVARENA_ENABLE\. Give 1 or 0\.$"),
        # A day is the most: no wait takes more, and JSON has no infinity.
        ({"KVARENA_TRANSFER_TIMEOUT": "inf"}, "transfer_timeout is 'inf'.*86400"),
        ({"KVARENA_TRANSFER_TIMEOUT": "86401"}, "transfer_timeout is '86401'.*86400"),
        # 2**63, one more than an address can be.
        ({"KVARENA_POOL_BYTES": "8388608TiB"}, r"KVARENA_POOL_BYTES.* is more than 1152921504606846976"),
        # The name of the file is known; what only begins like it is not.
        ({"KVARENA_CONFIGURATION": "kvarena.toml"}, "unknown environment variable: KVARENA_CONFIGURATION"),
    ],
)
def test_what_is_wrong_is_said(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(environ)


@pytest.mark.parametrize("name", Settings.__struct_fields__)
@pytest.mark.parametrize("value", ["\udcff", "a\0b"])
def test_bytes_that_are_no_text_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"KVARENA_{name.upper()}"):
        load_settings({f"KVARENA_{name.upper()}": value})


def test_a_nul_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kvarena.toml"
    for line in (r'socket_dir = "\u0000"', r'transfer = ["mooncake", "\u0000"]'):
        file.write_text(line)
        with pytest.raises(ConfigError, match=r"is not valid text.*kvarena\.toml"):
            load_settings({}, path=file)


def test_a_file_that_nests_too_deep_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "kvarena.toml"
    path.write_text("transfer = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"kvarena\.toml cannot be read"):
        load_settings({}, path=path)


def test_kubernetes_service_variables_are_left_alone_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    injected = {
        "KVARENA_PORT": "tcp://10.0.0.1:80",
        "KVARENA_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVARENA_PORT_80_TCP_PROTO": "tcp",
        "KVARENA_PORT_80_TCP_PORT": "80",
        "KVARENA_PORT_80_TCP_ADDR": "fd00::1",
        "KVARENA_SERVICE_HOST": "10.0.0.1",
        "KVARENA_SERVICE_PORT": "80",
        "KVARENA_SERVICE_PORT_HTTP": "80",
        "KVARENA_METRICS_PORT": "tcp://10.0.0.2:9400",
        "KVARENA_METRICS_SERVICE_HOST": "10.0.0.2",
    }
    settings = load_settings({**injected, "KVARENA_HEADROOM": "1MiB"})
    assert (settings.metrics_port, settings.headroom) == (None, 1 << 20)
    load_settings(injected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(name in line for name in injected)


@pytest.mark.parametrize(
    "given",
    [
        {"KVARENA_PORT": "80"},
        {"KVARENA_METRICS_PORT": "http://10.0.0.2:9400"},
        {"KVARENA_SERVICE_HOST": "a name"},
        {"KVARENA_HEADROM": "tcp://10.0.0.1:80"},
    ],
)
def test_what_only_resembles_a_service_variable_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        load_settings(given)
