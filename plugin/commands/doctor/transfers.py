"""Transfer engines: which load, and how fast each moves the memory of an arena, measured."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvarena.plugin.commands.doctor.child import Child, ChildFailed
from kvarena.plugin.commands.doctor.findings import Finding, Verdict
from kvarena.transfer.mooncake.install import installed_variants

__all__ = ["examine_engine", "installed", "measure", "names", "ucx_path"]

_ENGINES: Final = ("mooncake", "nixl", "same-host")

_BYTES: Final = {"cpu": 32 << 20, "cuda": 256 << 20}
_TIMEOUT_S: Final = 90.0
#: An arena that is so many times slower than ordinary memory has fallen off the fast path.
_FALLEN_OFF: Final = 5.0
_NIXL: Final = ("nixl", "nixl-cu12", "nixl-cu13")


def examine_engine(
    name: str, device: str, *, wanted: bool, quick: bool = False, directory: Path | None = None
) -> Iterator[Finding]:
    """Everything about one engine.

    Parameters
    ----------
    name : str
        ``"mooncake"``, ``"nixl"``, ``"same-host"``, or a third party's.
    device : str
        Whose memory.
    wanted : bool
        Whether the settings name it: what is not there is then broken, and no mere note.
    quick : bool
        Only look at what is installed.
    directory : Path, optional
        Where a same-host engine's sockets lie; by default its own choice.
    """
    packages = installed(name)
    named = f"{name} ({', '.join(packages)})" if packages else name
    if packages is not None and not packages:
        yield Finding(
            topic="transfer",
            verdict="broken" if wanted else "note",
            what=f"{name} is not installed",
            fix=_install(name, device) if wanted else "",
        )
        return
    if name == "mooncake" and len(packages or ()) > 1:
        yield Finding(
            topic="transfer",
            verdict="broken",
            what=f"{named}: installed together, each overwrites the other's mooncake/engine.so",
            fix=f"Uninstall all of them, then: {_install(name, device)}",
        )
        return
    if quick:
        # Whether there is a plugin for a third party's engine is known when it has made one.
        there = " is installed, and" if name in _ENGINES else ""
        yield Finding(topic="transfer", verdict="note", what=f"{named}{there} was not tried")
        return
    try:
        measured = measure(name, device, directory=directory)
    except ChildFailed as failure:
        # What nobody has installed or asked for may fail: it will not be used.
        verdict: Verdict = "broken" if wanted or packages else "warning"
        yield Finding(topic="transfer", verdict=verdict, what=f"{named}: {_first_line(str(failure))}")
        return
    yield _finding(named, name, measured, on_gpu=device.startswith("cuda"))


def installed(name: str) -> tuple[str, ...] | None:
    """Distributions that bring an engine, with their versions; None: it needs none."""
    if name == "mooncake":
        return tuple(f"{package} {version}" for package, version in installed_variants())
    if name != "nixl":
        return None
    found = []
    for package in _NIXL:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def measure(
    name: str, device: str, *, timeout: float = _TIMEOUT_S, directory: Path | None = None
) -> dict[str, Any]:
    """Move memory from one child to another, ordinary memory and an arena's.

    Parameters
    ----------
    name, device : str
        Which engine, and whose memory.
    timeout : float
        Seconds, for each answer.
    directory : Path, optional
        Where a same-host engine's sockets lie; by default its own choice.

    Returns
    -------
    dict
        ``connect_ms``; for ``"plain"`` (where the engine can) and ``"arena"`` the GB/s of one range and of
        scattered 16 KiB pages, and whether the bytes arrived; ``path``, where the engine tells it.

    Raises
    ------
    ChildFailed
        One of the two crashed, hung or refused.
    """
    nbytes = _BYTES["cuda" if device.startswith("cuda") else "cpu"]
    # UCX then writes which transport it takes for each operation.
    environ = {"UCX_PROTO_INFO": "y", "OMP_NUM_THREADS": "1"}
    arguments = [name, device, str(nbytes), *([] if directory is None else [str(directory)])]
    with (
        Child("transfer_probe", ["receive", *arguments], environ=environ) as receiver,
        Child("transfer_probe", ["send", *arguments], environ=environ) as sender,
    ):
        hello = receiver.answer(timeout)
        sender.tell(json.dumps(hello))
        measured: dict[str, Any] = sender.answer(timeout)
        for _ in hello["addresses"]:
            answer = sender.answer(timeout)
            kind = answer.pop("kind")
            receiver.tell(kind)
            measured[kind] = answer | receiver.answer(timeout)
        measured["path"] = ucx_path(sender.log)
        sender.tell("")
        receiver.tell("")
    return measured


def ucx_path(log: str) -> str:
    """How UCX writes to a peer, from its own tables: ``"zero-copy, cma/memory"``; empty: it does not say."""
    path, ours = "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.rpartition("]")[2].strip().strip("|").split("|")]
        if len(cells) == 1:
            if "cfg#" in cells[0]:
                peer = "self cfg#" not in cells[0]
            elif " by ucp_" in cells[0]:
                ours = peer and cells[0].startswith("remote memory write")
        elif ours and len(cells) == 3 and re.fullmatch(r"\d+\.\.inf", cells[0]):
            path = f"{cells[1]}, {cells[2]}"
    return path


def _finding(named: str, name: str, measured: dict[str, Any], *, on_gpu: bool) -> Finding:
    arena, plain = measured["arena"], measured.get("plain")
    path = measured["path"] or {"mooncake": "tcp", "same-host": "mapped handles"}.get(name, "")
    what = f"{named}: arena memory {_speed(arena)}" + (f", over {path}" if path else "")
    if not all(each["arrived"] for each in (arena, plain or arena)):
        return Finding(
            topic="transfer",
            verdict="broken",
            what=f"{named}: reported success, but the bytes did not arrive",
            fix="Do not use it on this machine; report it with this output.",
            data=measured,
        )
    # On the host both are copied by the kernel; the difference is huge pages, which memfds do not have.
    slower = plain["gb_per_s"] / arena["gb_per_s"] if plain and on_gpu else 1.0
    if slower > _FALLEN_OFF or "emulation" in path:
        return Finding(
            topic="transfer",
            verdict="warning",
            what=f"{what}; ordinary memory {plain['gb_per_s'] if plain else 0:.3g} GB/s: arena memory is off "
            "the fast path",
            fix="On one host use same-host (KVARENA_TRANSFER=same-host, in SGLang KVARENA_SAME_HOST=1); "
            "between hosts use Mooncake over RDMA.",
            data=measured,
        )
    return Finding(topic="transfer", verdict="ok", what=what, data=measured)


def _speed(measured: dict[str, Any]) -> str:
    return f"{measured['gb_per_s']:.3g} GB/s, in 16 KiB pages {measured['pages_gb_per_s']:.3g}"


def _install(name: str, device: str) -> str:
    on_cuda = device.startswith("cuda")
    extras = {"mooncake": ("mooncake-cu13" if on_cuda else "mooncake-cpu"), "nixl": "nixl-cu12"}
    extra = extras.get(name)
    return f"pip install 'kvarena[{extra}]'" if extra else f"Install the plugin that provides {name}."


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "it failed without a word"


def names(settings_transfer: Sequence[str]) -> tuple[str, ...]:
    """Ours, then those that only the settings name."""
    return tuple(dict.fromkeys((*_ENGINES, *settings_transfer)))
