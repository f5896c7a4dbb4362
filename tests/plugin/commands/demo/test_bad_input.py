"""Bad input to ``kvarena demo``: one clear message, exit status 2, and nothing on standard output."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest
from kvarena.plugin.commands.cli import main
from kvarena.plugin.commands.demo import command as demo
from kvarena.plugin.commands.demo.text_input import InputError, cut_into_prompts, read_text
from kvarena.plugin.config import Settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARENA_LOAD_PLUGINS", "0")


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["demo", "--json", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvarena demo: ")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("argument", ["--plot=", "--plot=/", "--plot=."])
def test_plot_without_a_file_name_is_refused(capsys: pytest.CaptureFixture[str], argument: str) -> None:
    assert "--plot does not name a file" in _refused(capsys, argument)


def test_insecure_without_a_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--insecure is about --port" in _refused(capsys, "--insecure")


def test_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "nowhere.txt"
    assert f"{path} cannot be read: No such file" in _refused(capsys, "--input", str(path))


def test_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be read: Is a directory" in _refused(capsys, "--input", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"text\0text", "is binary: it has NUL bytes"),
        (b"\x89PNG\r\n\x1a\n", "is not UTF-8 text: byte 0 is 0x89"),
        (b"caf\xe9", "byte 3 is 0xe9"),
        (b"abc", "a text of 3 bytes cannot be cut into 6 prompts"),
    ],
)
def test_content(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    assert said in _refused(capsys, "--input", str(path))


def test_far_larger_than_the_pool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"x" * 10_000)
    said = _refused(capsys, "--input", str(path), "--memory-limit", "4MiB")
    assert "larger than the pool" in said
    assert "--memory-limit" in said


def test_an_endless_file_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert "larger than the pool" in _refused(capsys, "--input", "/dev/zero")


def test_slightly_larger_than_the_pool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Known only once the memory has been measured: full pages fit, their window pages and the sink do not.
    path = tmp_path / "input"
    path.write_bytes(b"x" * 3900)
    said = _refused(capsys, "--input", str(path), "--memory-limit", "4MiB", "--requests", "4")
    assert "the input has 3904 tokens, which is larger than the pool: it holds" in said
    assert said.rstrip().endswith("Give a shorter file, or raise --memory-limit.")


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("POOL_BYTES", "raise KVARENA_POOL_BYTES."), ("HEADROOM", "or lower KVARENA_HEADROOM.")],
)
def test_a_pool_that_a_setting_makes_too_small_names_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    setting: str,
    remedy: str,
) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"x" * 3900)
    monkeypatch.setenv(f"KVARENA_{setting}", "2MiB")
    said = _refused(capsys, "--input", str(path), "--memory-limit", "4MiB", "--requests", "4")
    assert said.rstrip().endswith(remedy)


def test_a_memory_limit_below_the_floor_names_the_least(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"some words")
    said = _refused(capsys, "--input", str(path), "--memory-limit", "64KiB")
    assert "a memory limit of 65536 bytes is below what one request needs" in said
    assert "The least that works is " in said


def test_what_is_too_small_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"some words")
    monkeypatch.setenv("KVARENA_POOL_BYTES", "4096")
    said = _refused(capsys, "--input", str(path))
    assert "a limit of 4096 bytes on the pool is below what one request needs" in said
    assert "bytes: raise KVARENA_POOL_BYTES.\n" in said
    monkeypatch.delenv("KVARENA_POOL_BYTES")
    monkeypatch.setenv("KVARENA_HEADROOM", "1GiB")
    said = _refused(capsys, "--input", str(path), "--memory-limit", "24MiB")
    assert "25165824 bytes, less a headroom of 1073741824 bytes, is below what one request needs" in said
    assert "or lower KVARENA_HEADROOM.\n" in said


def test_on_a_gpu_the_smaller_of_two_limits_on_the_pool_counts() -> None:
    args = argparse.Namespace(device="cuda", transfer=None, hosts=1)
    for set_to, expected in ((None, 3 << 20), (1 << 20, 1 << 20), (8 << 20, 3 << 20)):
        settings = demo._settings(args, Settings(pool_bytes=set_to), 4 << 20, 1 << 20)
        assert settings.pool_bytes == expected


@pytest.mark.parametrize("limit", ["0", "-1", "many", "", "1XB"])
def test_a_memory_limit_that_is_none(capsys: pytest.CaptureFixture[str], limit: str) -> None:
    assert "--memory-limit" in _refused(capsys, f"--memory-limit={limit}")


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = _refused(capsys, "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--port", "-1"),
        ("--port", "65536"),
        ("--requests", "0"),
        ("--requests", "-3"),
        ("--requests", "100000"),
        ("--max-new-tokens", "0"),
        ("--max-new-tokens", "9999999"),
        ("--page-size", "0"),
        ("--page-size", "4096"),
        ("--chunk-pages", "0"),
        ("--window", "0"),
        ("--window", "-5"),
        ("--seed", "-1"),
    ],
)
def test_numbers_out_of_range(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    said = _refused(capsys, f"{option}={value}")
    assert option.lstrip("-").replace("-", "_") in said.replace("-", "_")
    assert value in said


@pytest.mark.parametrize(
    "options", [("--decode-device", "cuda:1"), ("--device", "cuda", "--decode-device", "cpu")]
)
def test_a_pair_of_which_one_has_no_gpu(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    said = _refused(capsys, *options)
    assert "the pair needs two GPUs" in said
    assert "--device cuda:0 --decode-device cuda:1" in said


def test_the_shipped_passage() -> None:
    text = read_text(None, max_bytes=1 << 20)
    assert 6000 <= len(text) <= 8000
    prompts = cut_into_prompts(text, 6)
    assert b"".join(prompts) == text
    assert len(prompts[0]) < 128 < len(prompts[1])


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_prompts_cover_the_text(count: int) -> None:
    for length in (count, count + 1, 1000):
        text = bytes(at % 251 for at in range(length))
        prompts = cut_into_prompts(text, count)
        assert b"".join(prompts) == text
        assert all(prompts)
        assert len(prompts) == count
    with pytest.raises(InputError):
        cut_into_prompts(b"x" * (count - 1), count)
