"""Starting Mooncake, and what it can do here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvarena.transfer.errors import EngineUnavailable
from kvarena.transfer.mooncake.install import installed_variants, load_transfer_engine
from kvarena.transfer.protocol import Capabilities

__all__ = ["MEANINGS", "NOT_REGISTERED", "capabilities_of", "start"]

# Mooncake's include/error.h.
MEANINGS = {
    -1: "invalid argument",
    -3: "the address is not registered",
    -7: "overlaps a registered region",
    -101: "the host name does not resolve",
    -102: "the peer does not answer",
    -200: "the metadata service failed",
    -202: "the device context failed",
}
NOT_REGISTERED = -3
# Over TCP, Mooncake refuses a batch of more than 2052 operations at once unless this is raised.
_QUEUE_KNOB = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
_QUEUE_LENGTH = 65535
_MAX_OPERATIONS = 16384  # of one batch, as far as it was measured


def start(hostname: str, protocol: str, device_name: str, timeout: float | None) -> Any:
    """An initialised ``mooncake.engine.TransferEngine``; sets the environment where nobody has.

    Raises
    ------
    EngineUnavailable
        It is missing or does not start.
    """
    transfer_engine = load_transfer_engine()()
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
        os.environ.setdefault(_QUEUE_KNOB, str(_QUEUE_LENGTH))
    if timeout is not None:
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(max(5, round(timeout))))
    code = transfer_engine.initialize(hostname, "P2PHANDSHAKE", protocol, device_name)
    if code != 0:
        raise EngineUnavailable(
            "mooncake",
            f"initialize({hostname!r}, P2PHANDSHAKE, {protocol!r}) returned {code} {MEANINGS.get(code, '')}",
            fix="Set KVARENA_TRANSFER_HOST to a name that resolves here, and a protocol that this host has: "
            "tcp always works.",
        )
    return transfer_engine


def capabilities_of(protocol: str, environ: Mapping[str, str]) -> Capabilities:
    """What Mooncake can do over a protocol, in the release and with the limits that are here."""
    if protocol == "tcp":
        # A target wants one registered buffer around each write, and looks at nothing else.
        return Capabilities(
            crosses_seams=False,
            spans_handles=True,
            detects_unmapped=False,
            live_reregistration=True,
            max_batch=_batch_limit(environ),
        )
    # The dma-buf export covers a range of several handles from 0.3.14 on, peermem always does.
    version = max((_release(version) for _, version in installed_variants()), default=(0,))
    whole_range = protocol == "rdma" and (version >= (0, 3, 14) or environ.get("WITH_NVIDIA_PEERMEM") == "1")
    return Capabilities(
        crosses_seams=False,
        spans_handles=whole_range,
        detects_unmapped=True,
        live_reregistration=protocol == "rdma",
        max_batch=_MAX_OPERATIONS,
    )


def _batch_limit(environ: Mapping[str, str]) -> int:
    try:
        queue = int(environ.get(_QUEUE_KNOB, "1024"))
    except ValueError:
        queue = 1024
    return max(1, min(queue, _MAX_OPERATIONS))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".post")[0].split(".") if part.isdigit())
