"""What can go wrong between two arenas; each error says what happened and what to set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvarena.errors import KvArenaError
from kvarena.transfer.protocol import Region

__all__ = [
    "Difference",
    "EngineUnavailable",
    "LeaseError",
    "ManifestMismatch",
    "PageError",
    "QuiesceTimeout",
    "RegistrationError",
    "SocketPathError",
    "TransferError",
    "TransferFailed",
    "TransferTimeout",
]


class TransferError(KvArenaError):
    """The root of this package's errors; it travels between processes (pickle keeps every field)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class EngineUnavailable(TransferError):
    """A transfer engine is missing, broken, installed twice, or does not start.

    Parameters
    ----------
    engine : str
        Its name, as in ``--transfer``.
    why : str
        What was found.
    fix : str
        The package or extra to install, or the setting to change.
    """

    def __init__(self, engine: str, why: str, *, fix: str = "") -> None:
        super().__init__(f"transfer engine {engine} is not available: {why}.", fix=fix)
        self.engine = engine
        self.why = why


class RegistrationError(TransferError):
    """An engine, or the ledger before it, refused to register or unregister a region.

    Parameters
    ----------
    engine : str
        The engine's name.
    region : Region
        Address and length in bytes.
    code : int or str or None
        What the engine returned; None when it was not asked.
    action : {"register", "unregister"}
        What was refused.
    meaning : str
        The code in words.
    unknown : bool
        The engine says that it does not hold this region.

    Attributes
    ----------
    lost : tuple of Region
        Regions that were registered before and could not be registered again during the rollback.
    """

    def __init__(
        self,
        engine: str,
        region: Region,
        code: int | str | None,
        *,
        action: str = "register",
        meaning: str = "",
        fix: str = "",
        unknown: bool = False,
    ) -> None:
        returned = "" if code is None else f" returned {code}"
        said = f": {meaning}" if meaning else ""
        super().__init__(f"{engine}: {action} of {_named(region)}{returned}{said}.", fix=fix)
        self.engine = engine
        self.region = region
        self.code = code
        self.action = action
        self.meaning = meaning
        self.unknown = unknown
        self.lost: tuple[Region, ...] = ()

    def losing(self, lost: Sequence[Region]) -> RegistrationError:
        """The same refusal, after a rollback that lost these regions."""
        error = RegistrationError(
            self.engine,
            self.region,
            self.code,
            action=self.action,
            meaning=self.meaning,
            fix=self.fix,
            unknown=self.unknown,
        )
        if lost:
            error.lost = tuple(lost)
            error.what += f" No longer registered: {', '.join(map(_named, lost))}."
            error.args = (f"{error.what} {error.fix}".strip(),)
        return error


class TransferFailed(TransferError):
    """A transfer was refused or broke; some of its bytes may have been written.

    Parameters
    ----------
    engine, peer : str
        Which engine, and to whom.
    code : int or str or None
        What the engine returned.
    operations : int
        How many operations the failed batch had; 0: it did not come to one.
    request : str or None
        The request that these pages belong to, where the caller knows one: with it the control
        plane can tell the receiver at once.
    """

    def __init__(
        self,
        engine: str,
        peer: str,
        code: int | str | None,
        why: str = "",
        *,
        operations: int = 0,
        request: str | None = None,
        fix: str = "",
    ) -> None:
        returned = "" if code is None else f" with {code}"
        whose = "" if request is None else f" for request {request}"
        size = f" of {operations} operations" if operations else ""
        what = f"{engine}: transfer{size} to {peer}{whose} failed{returned}"
        super().__init__(f"{what}: {why}." if why else f"{what}.", fix=fix)
        self.engine = engine
        self.peer = peer
        self.code = code
        self.why = why
        self.operations = operations
        self.request = request

    def of(self, request: str) -> TransferFailed:
        """The same failure, naming the request."""
        return TransferFailed(
            self.engine,
            self.peer,
            self.code,
            self.why,
            operations=self.operations,
            request=request,
            fix=self.fix,
        )


class TransferTimeout(TransferError):
    """A transfer did not end in time; it may still write until it has ended or its peer is gone."""

    def __init__(self, engine: str, peer: str, seconds: float, *, request: str | None = None) -> None:
        whose = "" if request is None else f" for request {request}"
        super().__init__(
            f"{engine}: transfer to {peer}{whose} did not end within {seconds:g} s.",
            fix="Keep its pages until the peer has been disconnected.",
        )
        self.engine = engine
        self.peer = peer
        self.seconds = seconds
        self.request = request

    def of(self, request: str) -> TransferTimeout:
        """The same timeout, naming the request."""
        return TransferTimeout(self.engine, self.peer, self.seconds, request=request)


class QuiesceTimeout(TransferError):
    """Transfers or leases did not drain in time, or a gate did not open in time."""

    def __init__(self, what: str, *, in_flight: int, seconds: float, fix: str = "") -> None:
        super().__init__(f"{what} within {seconds:g} s: {in_flight} in flight.", fix=fix)
        self.in_flight = in_flight
        self.seconds = seconds


class PageError(TransferError):
    """Page ids that cannot be copied: out of range, of a wrong type, or given twice."""


class Difference(NamedTuple):
    """One field in which two manifests differ."""

    field: str
    ours: object
    theirs: object


class ManifestMismatch(TransferError):
    """Two arenas whose pages do not mean the same bytes.

    Parameters
    ----------
    differences : sequence of Difference
        Every field that differs, with both values.
    """

    def __init__(self, differences: Sequence[Difference]) -> None:
        named = "; ".join(f"{d.field}: ours {d.ours!r}, theirs {d.theirs!r}" for d in differences)
        super().__init__(
            f"The peer's pages are not ours: {named}.",
            fix="Start both sides with the same model, KV dtype, page size and parallel layout.",
        )
        self.differences = tuple(differences)


class LeaseError(TransferError):
    """Destination pages that the receiver did not lease, or no longer leases, to this request."""

    def __init__(self, request: str, why: str, *, fix: str = "") -> None:
        super().__init__(f"lease of request {request}: {why}.", fix=fix)
        self.request = request
        self.why = why


class SocketPathError(TransferError):
    """The socket, or the directory that it is in, cannot be used safely; nothing was changed.

    Parameters
    ----------
    path : str
        Which path.
    why : str
        What is wrong with it.
    fix : str
        What to set or remove.
    """

    def __init__(self, path: str, why: str, *, fix: str = "") -> None:
        super().__init__(f"socket path {path}: {why}.", fix=fix)
        self.path = path
        self.why = why


def _named(region: Region) -> str:
    return f"[{region.address:#x}, +{region.nbytes})"


def _rebuild(cls: type[TransferError], args: tuple[object, ...], state: dict[str, object]) -> TransferError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
