"""Registers arena memory with transfer engines, and moves pages between arenas."""

from __future__ import annotations

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
from kvarena.transfer.protocol import Addresses, BufferInfos, Capabilities, Pending, Region, TransferEngine
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
