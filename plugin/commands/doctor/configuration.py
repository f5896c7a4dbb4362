"""Whether a configuration would be sized after capture: the settings, and every reason against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.errors import KvArenaError
from kvarena.plugin.commands.doctor.findings import Finding
from kvarena.plugin.config import Settings, load_settings, service_variables

if TYPE_CHECKING:
    from kvarena.pool import Refusal

__all__ = ["examine_embedded", "examine_settings", "refusals"]


def examine_settings(
    environ: Mapping[str, str] | None = None,
) -> tuple[Settings, list[Finding]]:
    """Read the settings as an engine would; bad ones are a finding, and the defaults are used."""
    try:
        settings = load_settings(environ)
    except KvArenaError as error:
        broken = Finding(topic="settings", verdict="broken", what=error.what, fix=error.fix)
        return Settings(), [broken]
    changed = [
        f"KVARENA_{name.upper()}={_shown(getattr(settings, name))}"
        for name in Settings.__struct_fields__
        if getattr(settings, name) != getattr(Settings(), name)
    ]
    what = ", ".join(changed) if changed else "all at their defaults (see the operator guide)"
    findings = [Finding(topic="settings", verdict="ok", what=what), *_directory(settings)]
    injected = service_variables(environ)
    if injected:
        what = f"not settings, Kubernetes sets them for a Service: {', '.join(injected)}"
        findings.append(Finding(topic="settings", verdict="note", what=what))
    return settings, findings


def examine_embedded(settings: Settings, found: dict[str, Any]) -> Iterator[Finding]:
    """Would the embedded engine be sized after capture on this device?

    Parameters
    ----------
    settings : Settings
        The operator's.
    found : dict
        What `probe_device` says of the device.
    """
    from kvarena.plugin.composition import collect_refusals, make_manager
    from kvarena.plugin.engines.embedded.config import EngineConfig

    device = str(found["device"]).partition(":")[0]
    config = EngineConfig(device=device)
    request = config.sizing_request(
        driver=found["driver"], transfer_backend=next(iter(settings.transfer), None)
    )
    try:
        reasons = collect_refusals(make_manager(settings), request)
    except KvArenaError as error:
        yield Finding(topic="engine", verdict="broken", what=f"embedded: {error.what}", fix=error.fix)
        return
    yield from refusals("embedded", reasons)
    free = int(found["free_bytes"])
    short = config.shortage(settings, granularity=int(found["granularity"]), free_bytes=free)
    if short is not None:
        given, fix = short
        what = f"embedded: {given} is below what one request needs, {free} bytes are free"
        yield Finding(topic="engine", verdict="broken", what=what, fix=fix)


def refusals(engine: str, reasons: Iterable[Refusal]) -> Iterator[Finding]:
    """One finding for each reason, or the one that there is none."""
    reasons = list(reasons)
    if not reasons:
        yield Finding(topic="engine", verdict="ok", what=f"{engine}: sized after capture, nothing refuses it")
    for each in reasons:
        yield Finding(
            topic="engine",
            verdict="refused",
            what=f"{engine}: {each.reason} [{each.code}]",
            fix=f"Change {each.setting}." if each.setting else "",
            data={"code": each.code, "setting": each.setting},
        )


def _directory(settings: Settings) -> Iterator[Finding]:
    """Sockets and status files need a directory that only we can enter; one that is not there is made."""
    from kvarena.plugin.observe.status.files import directory_of, exists
    from kvarena.transfer.owner_only import check_directory

    directory: Path = directory_of(settings)
    if not exists(directory):
        return
    try:
        check_directory(directory)
    except KvArenaError as error:
        yield Finding(
            topic="settings",
            verdict="broken" if "same-host" in settings.transfer or settings.same_host else "warning",
            what=f"no sockets or status files can be kept in {directory}: {error.what}",
            fix=error.fix,
        )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
