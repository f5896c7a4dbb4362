"""What can go wrong between two processes of one host, beyond what every engine can refuse."""

from __future__ import annotations

from kvarena.transfer.errors import TransferError, TransferFailed

__all__ = ["HandleImportError", "PeerRefused"]


class PeerRefused(TransferFailed):
    """One side refused to exchange memory with the other; nothing was mapped.

    Parameters
    ----------
    peer : str
        Its name, or the socket it was reached at.
    code : {"uid", "version", "name", "manifest", "identity", "description", "full", "refused", "unreachable"}
        Which check failed.
    why : str
        With the values of both sides.
    """

    def __init__(self, peer: str, code: str, why: str, *, fix: str = "") -> None:
        super().__init__("same-host", peer, code, why, fix=fix)
        self.args = (f"same-host: peer {peer} was refused ({code}): {why}. {fix}".strip(),)


class HandleImportError(TransferFailed):
    """Memory that a peer exported cannot be mapped here; what was mapped of it is unmapped again.

    Parameters
    ----------
    peer : str
        Whose memory.
    offset, nbytes : int
        Which bytes of its arena.
    why : str
        What the driver said.
    """

    def __init__(self, peer: str, offset: int, nbytes: int, why: str) -> None:
        fix = (
            "Same-host transfer needs both arenas on one kind of device, and peer access between two GPUs; "
            "use another engine where there is none."
        )
        super().__init__("same-host", peer, "import", why, fix=fix)
        self.args = (
            f"{nbytes} bytes at offset {offset} of {peer}'s arena cannot be mapped here: {why} {fix}",
        )
        self.offset = offset
        self.nbytes = nbytes


class WireError(TransferError):
    """A packet that no engine of this version sends."""

    def __init__(self, why: str) -> None:
        super().__init__(f"malformed packet: {why}.")
        self.why = why
