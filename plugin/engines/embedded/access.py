"""Who may speak on a control channel: whoever can enter a directory, or knows a secret."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import socket
from pathlib import Path
from typing import Final

import msgspec
import zmq
import zmq.utils.z85
from kvarena.errors import KvArenaError
from kvarena.plugin.config import Settings
from kvarena.plugin.observe.status.files import directory_of

__all__ = [
    "Access",
    "AddressInUse",
    "ControlRefused",
    "control_endpoint",
    "is_loopback",
    "local_endpoint",
    "new_secret",
    "tcp_endpoint",
]

_SECRET_BYTES: Final = 32
_PREFIX: Final = "control-"
# sun_path has 108 bytes and ends with a zero (unix(7)).
_PATH_BYTES: Final = 107


class AddressInUse(KvArenaError):
    """An address that cannot be listened on: its port is taken, or it is not an address of this host."""


class ControlRefused(KvArenaError):
    """A control channel that anybody could speak on; nothing was opened."""


class Access(msgspec.Struct, frozen=True):
    """How a TCP control channel knows its peers; a Unix socket needs nothing but its directory."""

    secret: str = ""
    """From `new_secret`, the same in every process of a deployment; empty: none."""
    insecure: bool = False
    """Speak without a secret on a loopback address, where every user of this host can connect."""

    def guard_hub(self, zmq_socket: zmq.Socket[bytes], host: str) -> bool:
        """Let a socket that is to be bound accept only peers that know the secret (CURVE, ZMTP 3.1).

        Returns
        -------
        bool
            Whether strangers are kept out.

        Raises
        ------
        ControlRefused
            There is no secret, and no permission to go without one, or `host` is reached from other hosts.
        """
        if self.secret:
            zmq_socket.curve_secretkey = _hub_key(self.secret)
            zmq_socket.curve_server = True
            return True
        self._refuse_unless_insecure(f"listen on {host}")
        if not is_loopback(host):
            raise ControlRefused(
                f"{host} is reached from other hosts, and a control channel without a secret would take "
                "orders from all of them.",
                fix="Give every process the same secret (kvarena.plugin.engines.embedded.access.new_secret).",
            )
        return False

    def guard_spoke(self, zmq_socket: zmq.Socket[bytes], address: str) -> None:
        """Let a socket that is to be connected speak only with a hub that knows the secret.

        Raises
        ------
        ControlRefused
            There is no secret, and no permission to go without one.
        """
        if self.secret:
            zmq_socket.curve_serverkey = zmq.curve_public(_hub_key(self.secret))
            # Who knows the hub's public key is let in: it comes from the secret, and is never sent in clear.
            zmq_socket.curve_publickey, zmq_socket.curve_secretkey = zmq.curve_keypair()
        else:
            self._refuse_unless_insecure(f"connect to {address}")

    def _refuse_unless_insecure(self, what: str) -> None:
        if not self.insecure:
            raise ControlRefused(
                f"cannot {what}: a control channel over TCP needs a secret that both sides know.",
                fix="Give every process the same secret (kvarena.plugin.engines.embedded.access.new_secret), "
                "or --insecure on a host whose users may all control it.",
            )


def new_secret() -> str:
    """A secret for the control channels of one deployment: 64 hexadecimal digits."""
    return secrets.token_hex(_SECRET_BYTES)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach an address; a name is looked at, not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tcp_endpoint(host: str, port: int) -> str:
    """An address as ZeroMQ writes it; port 0: a free one."""
    name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port or '*'}"


def control_endpoint(settings: Settings) -> str:
    """Where a decode worker listens: on a Unix socket if its address is a loopback one, else on that."""
    return local_endpoint(settings) if is_loopback(settings.transfer_host) else settings.transfer_host


def local_endpoint(settings: Settings) -> str:
    """A Unix socket in this user's own directory; sockets of dead processes there are removed.

    Raises
    ------
    SocketPathError
        The directory is not ours alone.
    AddressInUse
        Its path is too long for a socket.
    """
    from kvarena.transfer.owner_only import check_directory

    directory = Path(os.path.abspath(directory_of(settings)))
    check_directory(directory, create=True)
    for path in directory.glob(f"{_PREFIX}*.sock"):
        _remove_if_dead(path)
    path = directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(3)}.sock"
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise AddressInUse(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, the limit is {_PATH_BYTES}.",
            fix="Set KVARENA_SOCKET_DIR to a shorter path.",
        )
    return f"ipc://{path}"


def _hub_key(secret: str) -> bytes:
    key = hashlib.blake2b(secret.encode(), digest_size=_SECRET_BYTES, person=b"kvarena-hub").digest()
    return zmq.utils.z85.encode(key)


def _remove_if_dead(path: Path) -> None:
    """A process that was killed leaves its socket; whoever still listens answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return
