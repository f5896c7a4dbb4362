"""Settings: the environment first (``KVARENA_*``), then a TOML file, then defaults."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.byte_sizes import InvalidSizeError, parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DEVICE", "ConfigError", "Settings", "load_settings", "service_variables"]

logger = logging.getLogger("kvarena")

PREFIX = "KVARENA_"
CONFIG = "KVARENA_CONFIG"
#: Of switches of the project's own tests, which are read elsewhere.
NOT_SETTINGS = ("KVARENA_TEST_", "KVARENA_CONTRACT_")
#: How a device is named: PyTorch's names, of those that kvarena can use.
DEVICE: Final = re.compile(r"cpu|cuda(:\d+)?")
_ADDRESS = r"[0-9a-fA-F.:\[\]]+"
#: Names and values of the variables that Kubernetes sets for each Service.
_SERVICE_FORMS = tuple(
    (re.compile(name), re.compile(value))
    for name, value in (
        (r"\w+_SERVICE_HOST", _ADDRESS),
        (r"\w+_SERVICE_PORT(_\w+)?", r"\d+"),
        (r"\w+_PORT(_\d+_(TCP|UDP|SCTP))?", rf"(tcp|udp|sctp)://{_ADDRESS}:\d+"),
        (r"\w+_PORT_\d+_(TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
        (r"\w+_PORT_\d+_(TCP|UDP|SCTP)_PORT", r"\d+"),
        (r"\w+_PORT_\d+_(TCP|UDP|SCTP)_ADDR", _ADDRESS),
    )
)

# More than a day is a typing error, and waits of the system take no unbounded number.
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class ConfigError(KvArenaError):
    """A setting is unknown or has a value that cannot be used."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting, named in the environment as ``KVARENA_`` and the upper-case name.

    Sizes are read by `kvarena.plugin.byte_sizes.parse_bytes`: bytes, or a number with KiB, MiB, GiB or
    TiB (powers of 1024), kB, MB, GB or TB (powers of 1000).
    """

    enable: bool = False
    """Turn the plugin on inside an engine."""
    memory_limit: int | None = None
    """Bytes that the host driver may take (CPU only); None: what the machine has."""
    headroom: int = 0
    """Bytes to leave free beside the pool."""
    pool_bytes: int | None = None
    """The most that the pool may get; None: what fits."""
    transfer: tuple[str, ...] = ()
    """Transfer engines, comma-separated: mooncake, nixl, same-host, or a third party's."""
    transfer_host: str = "127.0.0.1"
    """The address that peers reach this process at."""
    transfer_timeout: Seconds = 10.0
    """Seconds after which a transfer, or a silent peer, counts as failed; a day at most."""
    same_host: bool = False
    """Inside SGLang: serve peers on this host through mapped arenas."""
    socket_dir: str | None = None
    """Where same-host sockets and status files lie; a directory of mode 0700. None: chosen."""
    load_plugins: bool = True
    """Load the installed distributions of the entry-point group ``kvarena``."""
    block_plugins: tuple[str, ...] = ()
    """Entry-point names that are not loaded, comma-separated."""
    metrics_port: Port | None = None
    """Serve Prometheus metrics on this port; 0: a free one. In SGLang the index of the GPU is added."""
    metrics_host: str = "127.0.0.1"
    """The address that metrics are served on: whoever reaches it can read them."""
    status: bool = True
    """Keep an owner-only status file for ``kvarena status``."""
    sglang_experimental: bool = False
    """Back-port post-capture sizing to SGLang releases that are not fully supported (0.5.17-0.5.19)."""
    peak_margin: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.5
    """SGLang: the share of the largest measured step that stays free on top of it."""
    profile_dir: str | None = None
    """SGLang: keep measurements of steps here between starts; a directory of mode 0700. None: not kept."""
    max_running: Literal["graphs"] | None = None
    """SGLang: ``graphs`` limits running requests to what decode graphs cover, unless a limit is given."""
    input_logprobs: bool = False
    """SGLang: leave room for the log-probabilities of whole prompts."""
    finalize_retries: Annotated[int, msgspec.Meta(ge=0, le=32)] = 4
    """How often finalize tries again with less when backing runs out of memory."""


def load_settings(
    environ: Mapping[str, str] | None = None, *, path: str | os.PathLike[str] | None = None
) -> Settings:
    """Read the settings.

    Parameters
    ----------
    environ : mapping, optional
        Instead of the process's environment.
    path : path, optional
        A TOML file with the same names in lower case; by default the one that ``KVARENA_CONFIG`` names.

    Raises
    ------
    ConfigError
        An unknown name, a value of the wrong kind, or a file that cannot be read; the message names
        the variable or key.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get(CONFIG) or None
    values: dict[str, Any] = _read_toml(Path(path)) if path else {}
    _refuse_unknown(values, f"key in {path}", lambda name: name)
    given = {
        name[len(PREFIX) :].lower(): value
        for name, value in environ.items()
        # An empty variable is how a shell unsets one for a single command.
        if value and name.startswith(PREFIX) and name != CONFIG and not name.startswith(NOT_SETTINGS)
    }
    injected = service_variables(environ)
    given = {name: value for name, value in given.items() if PREFIX + name.upper() not in injected}
    _say_once(injected)
    _refuse_unknown(given, "environment variable", lambda name: PREFIX + name.upper())
    sources = dict.fromkeys(values, str(path)) | {name: PREFIX + name.upper() for name in given}
    values |= {name: _split(name, value) for name, value in given.items()}
    _refuse_unprintable(values, sources)
    for name in ("memory_limit", "headroom", "pool_bytes"):
        if name in values:
            try:
                values[name] = parse_bytes(values[name], what=f"{name} ({sources[name]})")
            except InvalidSizeError as error:
                raise ConfigError(error.what, fix=error.fix) from None
    try:
        # Not strict: an environment knows only strings, so "1" is a number and a truth value.
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        # "Expected `int` <= 32 - at `$.finalize_retries`"
        why, _, where = str(error).partition(" - at `$.")
        name = re.split(r"\W", where)[0]
        raise ConfigError(
            f"setting {name} is {values[name]!r}: {why[:1].lower()}{why[1:]}.",
            fix=f"Change {sources[name]}." + (" Give 1 or 0." if "`bool`" in why else ""),
        ) from error


def service_variables(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Variables that Kubernetes injects for a Service named ``kvarena`` or ``kvarena-...``: not settings.

    They are recognized by their form: ``KVARENA_PORT=tcp://10.0.0.1:80``, also under the name of a setting
    (``KVARENA_METRICS_PORT``), ``..._SERVICE_HOST``, ``..._SERVICE_PORT``, ``..._PORT_80_TCP_ADDR``
    (https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables).

    Parameters
    ----------
    environ : mapping, optional
        Instead of the process's environment.
    """
    environ = os.environ if environ is None else environ
    return tuple(
        sorted(
            name
            for name, value in environ.items()
            if name.startswith(PREFIX)
            and any(form.fullmatch(name) and of.fullmatch(value) for form, of in _SERVICE_FORMS)
        )
    )


@cache
def _say_once(injected: tuple[str, ...]) -> None:
    if injected:
        logger.warning(
            "kvarena: left alone, as Kubernetes sets them for a Service of this name: %s", ", ".join(injected)
        )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # what is not UTF-8 or not TOML is a ValueError
        raise ConfigError(
            f"the settings file {path} cannot be read: {error}.", fix="Correct it, or unset KVARENA_CONFIG."
        ) from error


def _refuse_unknown(values: Mapping[str, object], where: str, spelled: Any) -> None:
    known = Settings.__struct_fields__
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown {where}: {', '.join(map(spelled, unknown))}.",
            fix=f"Known are: {', '.join(map(spelled, known))}.",
        )


def _refuse_unprintable(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """A NUL, or bytes that are not UTF-8, would fail far from here, in a path or a message."""
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and ("\0" in text or any("\ud800" <= each <= "\udfff" for each in text)):
                raise ConfigError(
                    f"setting {name} is not valid text: {text!r}.", fix=f"Change {sources[name]}."
                )


def _split(name: str, value: str) -> object:
    if name in ("transfer", "block_plugins"):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value
