"""Which side of a pair makes the copies."""

from __future__ import annotations

from typing import Literal

from kvarena.transfer.same_host.errors import HandleImportError

__all__ = ["Asked", "Direction", "choose_direction"]

Asked = Literal["auto", "push", "pull"]
Direction = Literal["push", "pull"]


def choose_direction(
    asked: Asked, peer: str, reserved_bytes: int, *, ours: bool | None, theirs: bool | None
) -> Direction:
    """Push if nothing stands against it: it takes no packet on the way, pulling takes one.

    Between two H200s, over NVLink, a copy moves some 3 % more when it reads from the other GPU than when it
    writes to it (256 MiB: 381 against 372 GB/s), but the packet costs more than that: end to end 370 GB/s
    were pushed and 258 pulled (docs/engines/same-host.md). So ``auto`` pulls only where pushing cannot be.

    Parameters
    ----------
    asked : {"auto", "push", "pull"}
    peer, reserved_bytes
        For messages.
    ours : bool, optional
        Whether our device can map memory of the peer's (cuDeviceCanAccessPeer); None: not known, as the
        peer's device is not visible in this process. Then it is tried.
    theirs : bool, optional
        Whether the peer's can map ours.

    Raises
    ------
    HandleImportError
        The way that was asked for, or every way, is closed.
    """
    if asked != "pull" and ours is not False:
        return "push"
    if asked != "push" and theirs is not False:
        return "pull"
    reasons = []
    if ours is False and asked != "pull":
        reasons.append("our device cannot access the peer's, so nothing can be pushed")
    if theirs is False and asked != "push":
        reasons.append("the peer's device cannot access ours, so nothing can be pulled")
    raise HandleImportError(peer, 0, reserved_bytes, f"{'; '.join(reasons)} (cuDeviceCanAccessPeer).")
