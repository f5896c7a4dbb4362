"""The sending side's first words: from a description to a peer whose arena is mapped."""

from __future__ import annotations

import json
import socket
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kvarena.errors import KvArenaError
from kvarena.transfer.errors import Difference, ManifestMismatch
from kvarena.transfer.same_host.copy.clock import Copier
from kvarena.transfer.same_host.errors import HandleImportError, PeerRefused, WireError
from kvarena.transfer.same_host.mapped_arena import MappedArena
from kvarena.transfer.same_host.memory import MemoryDriver
from kvarena.transfer.same_host.peer import Attached, Peer
from kvarena.transfer.same_host.profile import EngineProfile
from kvarena.transfer.same_host.ring import Ring
from kvarena.transfer.same_host.sockets import dial
from kvarena.transfer.same_host.wire import VERSION, Packet, PacketKind, encode, field, receive, transmit

__all__ = ["Description", "attach"]

_FORMAT = "kvarena-same-host"


class Description(NamedTuple):
    """How to reach an engine."""

    path: str
    name: str
    identity: str
    epoch: int

    def encode(self) -> bytes:
        """For a peer."""
        return json.dumps({"format": _FORMAT, "version": VERSION, **self._asdict()}).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> Description:
        """From a peer. Raises `PeerRefused`."""
        try:
            body = json.loads(encoded)
            if not isinstance(body, dict) or body.get("format") != _FORMAT:
                raise WireError("it is no description of a same-host engine")
            if body.get("version") != VERSION:
                raise PeerRefused(
                    "?", "version", f"it speaks version {body.get('version')}, we speak {VERSION}"
                )
            return cls(
                field(body, "path", str),
                field(body, "name", str),
                field(body, "identity", str),
                field(body, "epoch", int),
            )
        except (ValueError, RecursionError, WireError) as error:
            raise PeerRefused("?", "description", str(error)) from error


def attach(
    description: Description, profile: EngineProfile, copier: Copier, make_peer: Callable[[Attached], Peer]
) -> Peer:
    """Shake hands, and map what the peer exports.

    Parameters
    ----------
    profile : EngineProfile
        Who we are, and how long the peer may take.
    copier : Copier
        Of our memory.
    make_peer : callable
        Owns what it is given; `RuntimeError` if it cannot use it.

    Raises
    ------
    PeerRefused
        The peer cannot be reached, is not who it should be, or does not want us.
    ManifestMismatch
        Its pages are not ours.
    HandleImportError
        Its memory cannot be mapped here.
    SocketPathError
        Its socket is not one to trust.
    """
    timeout = profile.connect_timeout
    deadline = time.monotonic() + timeout
    sock = dial(Path(description.path), timeout)
    try:
        hello: dict[str, Any] = {"name": profile.name, "identity": profile.identity}
        manifest = profile.encoded_manifest()
        if manifest is not None:
            hello["manifest"] = b64encode(manifest).decode()
        try:
            transmit(sock, encode(PacketKind.HELLO, hello))
        except OSError as error:
            raise _unreachable(description, error) from error
        welcome = _next(sock, description)
        if welcome.kind is PacketKind.REFUSE:
            welcome.close_fds()
            _raise_refusal(description, welcome.body)
        arena, ring = _check_welcome(welcome, description, profile, copier)
    except BaseException:
        sock.close()
        raise
    try:
        peer = make_peer(Attached(description.name, description.identity, arena, ring, sock))
    except RuntimeError as error:
        sock.close()
        raise HandleImportError(
            description.name, 0, ring.nbytes, f"the memory for completions cannot be used: {error}"
        ) from error
    try:
        while peer.epoch < field(welcome.body, "epoch", int):
            # For all of it: packets that lead nowhere could go on for ever, however fast they come.
            left = deadline - time.monotonic()
            if left <= 0:
                raise _unreachable(description, f"timed out: it did not export its memory in {timeout:g} s")
            sock.settimeout(left)
            peer.handle(_next(sock, description))
            if peer.gone is not None:
                raise PeerRefused(description.name, "refused", peer.gone)
    except WireError as error:
        peer.close(str(error))
        raise PeerRefused(description.name, "description", str(error)) from error
    except BaseException as error:
        peer.close(str(error))
        raise
    peer.listen()
    return peer


def _check_welcome(
    welcome: Packet, description: Description, profile: EngineProfile, copier: Copier
) -> tuple[MappedArena, Ring]:
    try:
        if welcome.kind is not PacketKind.WELCOME or len(welcome.fds) != 1:
            raise WireError(f"{welcome.kind.name} with {len(welcome.fds)} descriptors instead of WELCOME")
        body = welcome.body
        identity, memory = field(body, "identity", str), field(body, "memory", str)
        base, reserved = field(body, "base", int), field(body, "reserved_bytes", int)
        device = field(body, "device", str)
        field(body, "epoch", int)
        manifest = b64decode(field(body, "manifest", str)) if "manifest" in body else None
        ring = Ring(welcome.fds[0])
    except (WireError, ValueError) as error:
        raise PeerRefused(description.name, "description", str(error)) from error
    finally:
        welcome.close_fds()
    try:
        if identity != description.identity:
            raise PeerRefused(
                description.name,
                "identity",
                f"another engine listens at {description.path} now",
                fix="Connect to its new description.",
            )
        profile.check_manifest(manifest)
        driver = profile.arena.driver
        if memory != driver.name:
            raise HandleImportError(
                description.name, 0, reserved, f"it is {memory} memory, ours is {driver.name}."
            )
        if copier.can_reach(device) is False:
            raise HandleImportError(
                description.name,
                0,
                reserved,
                f"our device cannot access the peer's, {device} (cuDeviceCanAccessPeer).",
            )
        return _reserve(driver, description.name, base, reserved), ring
    except BaseException:
        ring.close()
        raise


def _reserve(driver: MemoryDriver, name: str, base: int, reserved: int) -> MappedArena:
    try:
        return MappedArena(driver, name, base, reserved)
    except KvArenaError as error:
        raise HandleImportError(name, 0, reserved, str(error)) from error


def _next(sock: socket.socket, description: Description) -> Packet:
    for _ in range(2):
        try:
            packet = receive(sock)
        except ConnectionResetError:
            continue  # what was sent before can still be read
        except WireError as error:
            raise PeerRefused(description.name, "description", str(error)) from error
        except OSError as error:
            raise _unreachable(description, error) from error
        if packet is not None:
            return packet
        break
    raise _unreachable(description, "it closed the connection")


def _unreachable(description: Description, error: object) -> PeerRefused:
    return PeerRefused(description.name, "unreachable", str(error), fix="Is that process alive?")


def _raise_refusal(description: Description, body: dict[str, Any]) -> NoReturn:
    code, why = str(body.get("code")), str(body.get("why"))
    differences = body.get("differences")
    if code == "manifest" and isinstance(differences, list):
        raise ManifestMismatch(
            [
                Difference(str(row[0]), str(row[2]), str(row[1]))
                for row in differences
                if isinstance(row, list) and len(row) == 3
            ]
        )
    fix = "Give every engine of a host its own name." if code == "name" else ""
    raise PeerRefused(description.name, code, why, fix=fix)
