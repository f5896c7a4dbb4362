"""Registers arena memory with transfer engines, and moves pages between arenas.

The names are loaded on first use, so that an engine costs nothing where another is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarena.transfer._same_host_errors import HandleImportError, PeerRefused, SocketPathError
    from kvarena.transfer._same_host_incoming import Incoming
    from kvarena.transfer.channel import ArenaPages, Hello, PageChannel, PageMoves
    from kvarena.transfer.errors import (
        Difference,
        EngineUnavailable,
        LeaseError,
        ManifestMismatch,
        PageError,
        QuiesceTimeout,
        RegistrationError,
        TransferError,
        TransferFailed,
        TransferTimeout,
    )
    from kvarena.transfer.lease import Lease, LeaseTable
    from kvarena.transfer.leased_pages import LeasedPageEngine
    from kvarena.transfer.ledger import RegistrationLedger
    from kvarena.transfer.manifest import Manifest, SubPoolManifest
    from kvarena.transfer.mooncake import MooncakeEngine
    from kvarena.transfer.nixl import NixlEngine
    from kvarena.transfer.nixl_install import slow_path_reason
    from kvarena.transfer.pages import PageCopies, join_copies, plan_page_copies
    from kvarena.transfer.protocol import (
        Addresses,
        BufferInfos,
        Capabilities,
        Pending,
        Region,
        TransferEngine,
    )
    from kvarena.transfer.quiesce import Quiesce
    from kvarena.transfer.recording import RecordingEngine
    from kvarena.transfer.same_host import SameHostEngine

__all__ = [
    "Addresses",
    "ArenaPages",
    "BufferInfos",
    "Capabilities",
    "Difference",
    "EngineUnavailable",
    "HandleImportError",
    "Hello",
    "Incoming",
    "Lease",
    "LeaseError",
    "LeaseTable",
    "LeasedPageEngine",
    "Manifest",
    "ManifestMismatch",
    "MooncakeEngine",
    "NixlEngine",
    "PageChannel",
    "PageCopies",
    "PageError",
    "PageMoves",
    "PeerRefused",
    "Pending",
    "Quiesce",
    "QuiesceTimeout",
    "RecordingEngine",
    "Region",
    "RegistrationError",
    "RegistrationLedger",
    "SameHostEngine",
    "SocketPathError",
    "SubPoolManifest",
    "TransferEngine",
    "TransferError",
    "TransferFailed",
    "TransferTimeout",
    "join_copies",
    "plan_page_copies",
    "slow_path_reason",
]

_NAMES = {
    "_same_host_errors": (
        "HandleImportError",
        "PeerRefused",
        "SocketPathError",
    ),
    "_same_host_incoming": ("Incoming",),
    "channel": (
        "ArenaPages",
        "Hello",
        "PageChannel",
        "PageMoves",
    ),
    "errors": (
        "Difference",
        "EngineUnavailable",
        "LeaseError",
        "ManifestMismatch",
        "PageError",
        "QuiesceTimeout",
        "RegistrationError",
        "TransferError",
        "TransferFailed",
        "TransferTimeout",
    ),
    "lease": (
        "Lease",
        "LeaseTable",
    ),
    "leased_pages": ("LeasedPageEngine",),
    "ledger": ("RegistrationLedger",),
    "manifest": (
        "Manifest",
        "SubPoolManifest",
    ),
    "mooncake": ("MooncakeEngine",),
    "nixl": ("NixlEngine",),
    "nixl_install": ("slow_path_reason",),
    "pages": (
        "PageCopies",
        "join_copies",
        "plan_page_copies",
    ),
    "protocol": (
        "Addresses",
        "BufferInfos",
        "Capabilities",
        "Pending",
        "Region",
        "TransferEngine",
    ),
    "quiesce": ("Quiesce",),
    "recording": ("RecordingEngine",),
    "same_host": ("SameHostEngine",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
