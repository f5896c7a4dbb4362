"""Moves pages between processes of one host through memory that both have mapped."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy.typing as npt
from kvarena.transfer._batch import PageBatch, PageLease
from kvarena.transfer.errors import EngineUnavailable, PageError, QuiesceTimeout, TransferFailed
from kvarena.transfer.fork import close_in_children
from kvarena.transfer.owner_only import default_directory
from kvarena.transfer.pages.plan import page_ids
from kvarena.transfer.protocol import Capabilities, Region
from kvarena.transfer.same_host.attach import Description
from kvarena.transfer.same_host.channel import SocketLoop
from kvarena.transfer.same_host.copy.factory import make_copier
from kvarena.transfer.same_host.exports import Exports
from kvarena.transfer.same_host.incoming import Incoming, IncomingTable
from kvarena.transfer.same_host.memory import ArenaMemory
from kvarena.transfer.same_host.peer import Peer
from kvarena.transfer.same_host.peers import Peers
from kvarena.transfer.same_host.pending import SameHostPending
from kvarena.transfer.same_host.profile import EngineProfile
from kvarena.transfer.same_host.server import Server
from kvarena.transfer.same_host.sockets import Listener, fresh_name, listen
from kvarena.transfer.same_host.subscribers import Subscribers

if TYPE_CHECKING:
    from kvarena.transfer.pages.manifest import Manifest

__all__ = ["SameHostEngine"]


@final
class SameHostEngine:
    """A `TransferEngine` for two processes of one user on one host.

    One side hands the descriptors of its arena's handles to the other over a Unix socket, which maps
    them and moves pages with one gather-scatter kernel on a stream of its own (CUDA), or with memory
    copies in a thread of its own (host). Nothing but registered regions is read or written, and
    `submit_pages` writes nothing but pages that the receiver has leased.

    Parameters
    ----------
    arena : ArenaMemory
        Ours; `kvarena.pool.Arena` is one. It is read, and must outlive the engine.
    name : str, optional
        Of this engine on this host, unique; part of the socket's path.
    directory : Path, optional
        Where the socket is made: mode 0700, and ours. Default: ``$XDG_RUNTIME_DIR/kvarena``, or
        ``/tmp/kvarena-<uid>``.
    manifest : Manifest, optional
        What our pages mean; a peer whose pages mean something else is refused.
    connect_timeout : float
        Seconds that a peer may take to answer.
    drain_timeout : float
        Seconds that peers may take to let go of memory, and copies to end.

    Raises
    ------
    SocketPathError
        The socket cannot be made there.
    EngineUnavailable
        CUDA memory, but no Triton or driver to move it with; or no descriptor or thread is left. Nothing
        stays behind.
    """

    name = "same-host"
    capabilities = Capabilities(
        crosses_seams=True, spans_handles=True, detects_unmapped=True, live_reregistration=True
    )

    def __init__(
        self,
        arena: ArenaMemory,
        *,
        name: str | None = None,
        directory: Path | None = None,
        manifest: Manifest | None = None,
        connect_timeout: float = 10.0,
        drain_timeout: float = 30.0,
    ) -> None:
        self._arena = arena
        self.engine_name = name or fresh_name()
        self._drain_timeout = drain_timeout
        self._changed = threading.Condition(threading.RLock())
        self._incoming = IncomingTable()
        self._exports = Exports(arena, self.name)
        self._subscribers = Subscribers(self._exports, self._changed)
        self._closed = False
        profile = EngineProfile(
            self.engine_name, secrets.token_hex(8), arena, manifest, connect_timeout, drain_timeout
        )
        with contextlib.ExitStack() as undo:
            try:
                self._start(profile, listen(directory or default_directory(), self.engine_name), undo)
            except (RuntimeError, OSError) as error:
                raise EngineUnavailable(
                    self.name,
                    f"it could not be started ({error})",
                    fix="Raise the limits of descriptors and processes (ulimit -n, ulimit -u).",
                ) from error
            undo.pop_all()
        close_in_children(self)

    def _start(self, profile: EngineProfile, listener: Listener, undo: contextlib.ExitStack) -> None:
        """Start threads and listen; what `undo` holds takes it back."""
        undo.callback(listener.path.unlink, missing_ok=True)
        undo.callback(listener.sock.close)
        self._copier = make_copier(profile.arena.driver, f"kvarena-copy-{self.engine_name}")
        undo.callback(self._copier.close)
        self._loop = SocketLoop(f"kvarena-socket-{self.engine_name}", lambda: self._peers.look_at_copier())
        undo.callback(self._loop.close)
        device = self._copier.identity()
        self._peers = Peers(profile, self._copier, self._exports, self._loop)
        self._server = Server(
            self._loop,
            listener,
            self._subscribers,
            self._incoming,
            profile,
            lambda: profile.welcome(self._exports.epoch, device),
        )

    @property
    def socket_path(self) -> Path:
        """Where peers reach us."""
        return self._server.path

    @property
    def regions(self) -> tuple[Region, ...]:
        """What is registered."""
        return self._exports.regions

    @property
    def attached(self) -> tuple[str, ...]:
        """Engines that have our arena mapped."""
        return self._subscribers.names

    def peer(self, key: str) -> Peer:
        """An engine that we send to. Raises `TransferFailed`."""
        return self._peers[key]

    def register(self, regions: Sequence[Region]) -> None:
        """See `TransferEngine.register`; connected peers are told at once."""
        with self._changed:
            self._exports.add([Region(*region) for region in regions])
            self._subscribers.tell_all()

    def unregister(self, regions: Sequence[Region]) -> None:
        """See `TransferEngine.unregister`. On return no peer writes or maps them, and we send none.

        A peer that does not let go within `drain_timeout` is detached.

        Raises
        ------
        RegistrationError
            One is not registered; nothing has changed.
        QuiesceTimeout
            Our own transfers did not end; they are registered still.
        """
        regions = [Region(*region) for region in regions]
        with self._changed:
            self._exports.check_held(regions)
        self._peers.drain(self._drain_timeout)
        with self._changed:
            self._exports.remove(regions)
            epoch = self._exports.epoch
            self._subscribers.tell_all()
        try:
            self._peers.drain(self._drain_timeout)  # what was checked before, and started after
        except QuiesceTimeout:
            with self._changed:
                self._exports.add(regions)
                self._subscribers.tell_all()
            raise
        self._subscribers.wait_until_let_go(epoch, self._drain_timeout)

    def refresh(self) -> None:
        """Look at the arena's handles again, and tell peers what has changed beneath the regions."""
        with self._changed:
            if self._exports.refresh():
                self._subscribers.tell_all()

    def describe(self) -> bytes:
        """See `TransferEngine.describe`."""
        with self._changed:
            return Description(
                str(self._server.path), self.engine_name, self._peers.profile.identity, self._exports.epoch
            ).encode()

    def connect(self, description: bytes) -> str:
        """See `TransferEngine.connect`; the key is the peer's `engine_name`.

        Raises
        ------
        PeerRefused
            It cannot be reached, or one side refuses the other.
        ManifestMismatch
            Its pages are not ours.
        HandleImportError
            Its memory cannot be mapped here.
        """
        return self._peers.connect(description)

    def disconnect(self, peer: str) -> None:
        """See `TransferEngine.disconnect`; waits for what is under way."""
        self._peers.disconnect(peer)

    def submit(
        self,
        peer: str,
        src: npt.ArrayLike,
        dst: npt.ArrayLike,
        lengths: npt.ArrayLike,
        *,
        after: int | None = None,
    ) -> SameHostPending:
        """See `TransferEngine.submit`.

        Parameters
        ----------
        after : int, optional
            A CUDA stream whose work so far must be done before the sources are read.
        """
        known = self._peers[peer]
        try:
            sources, targets, counts = (
                page_ids(column, "addresses and lengths").ravel() for column in (src, dst, lengths)
            )
        except PageError as error:
            raise TransferFailed(self.name, peer, "EINVAL", str(error).rstrip(".")) from error
        if not sources.size == targets.size == counts.size or int(counts.min(initial=0)) < 0:
            why = f"{sources.size} sources, {targets.size} destinations, lengths {counts.tolist()[:4]}"
            raise TransferFailed(self.name, peer, "EINVAL", why)
        return known.spans(sources, targets, counts, after)

    def submit_pages(self, peer: str, batch: PageBatch) -> SameHostPending:
        """Start writing leased pages, in one launch; the receiver's `expect` learns when they are there.

        Raises
        ------
        LeaseError
            A page is not leased, is written twice, or the lease has ended.
        TransferFailed
            The peer is gone, or pages are not registered on either side. The receiver is told.
        PageError
            Lists of different lengths or of no integers, or a page size that is not positive.
        """
        known = self._peers[peer]
        sources, targets = page_ids(batch.src), page_ids(batch.dst)
        if sources.ndim != 1 or sources.shape != targets.shape or batch.page_bytes <= 0:
            raise PageError(
                f"{sources.shape} source pages for {targets.shape} destinations of {batch.page_bytes} bytes."
            )
        base = self._arena.base if batch.src_base is None else batch.src_base
        return known.pages(batch, sources, targets, base)

    def admit(self, peer: str, lease: PageLease) -> None:
        """Get to know a lease when its request arrives, so that the first `submit_pages` need not."""
        self._peers[peer].admit(lease)

    def give_up(self, peer: str, lease: PageLease, why: str) -> None:
        """Tell the receiver at once that what it leased will not come (an aborted prefill)."""
        self._peers[peer].give_up(lease, why)

    def expect(self, lease: PageLease, *, sender: str | None = None) -> Incoming:
        """Wait for the pages of a lease that we granted; ask before the lease goes to the sender.

        Parameters
        ----------
        sender : str, optional
            The `engine_name` of the one that shall write them: if it dies, even before it has begun, the
            wait ends at once. Without a name that holds as soon as it has admitted the lease, or begun.
        """
        with self._changed:
            return self._incoming.expect(lease, self._exports.epoch, sender)

    def revoke(self, lease: PageLease, why: str = "it was revoked") -> None:
        """Take a lease back; on return no peer writes its pages, now or later.

        A lease that one sender has admitted, begun, or is expected from is taken back from that one alone:
        others do not hold the caller up.
        """
        key = (lease.request, lease.serial)
        sender = self._incoming.revoke(key, why)
        self._subscribers.revoke(key, sender, self._drain_timeout)

    def prepare(self, page_bytes: int) -> None:
        """Compile for pages of this size now, instead of in the first transfer."""
        self._copier.prepare(page_bytes)

    def close(self) -> None:
        """See `TransferEngine.close`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._peers.close()
        self._server.close()
        self._incoming.lost(None, "this engine was closed")
        self._loop.close()
        self._copier.close()
        self._peers.let_go()  # what outlasted its patience has ended now
        with self._changed:
            self._exports.close()

    def leave_to_parent(self) -> None:
        """In a forked child this engine is closed; the parent's goes on."""
        if self._closed:
            return
        self._closed = True
        self._changed = threading.Condition(threading.RLock())  # a thread that is not here may hold the other
        self._peers.leave_to_parent()
        self._loop.leave_to_parent()
        self._exports.close()

    def __enter__(self) -> SameHostEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
