"""What a prefill and a decode worker must have in common, and when a silent one counts as lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.clock import AwakeClock
from kvarena.plugin.engines.embedded.config import FULL, WINDOW, EngineConfig, ModelConfig
from kvarena.transfer import ArenaPages, Difference, Manifest, ManifestMismatch, PeerPages, SubPoolManifest

if TYPE_CHECKING:
    from kvarena.pool import UnifiedKVPool
    from kvarena.transfer import PageChannel

__all__ = [
    "PeerLost",
    "awake_clock",
    "check_peer",
    "describe_model",
    "describe_pages",
    "make_manifest",
    "ping_interval",
    "silence_limit",
]

_SILENCE: Final = 0.75
_PINGS: Final = 8
_MAX_PING_S: Final = 0.25


class PeerLost(KvArenaError):
    """A peer died, hangs, or can no longer be reached."""


def silence_limit(timeout: float) -> float:
    """Seconds of silence after which a peer is lost: early enough to report it within `timeout`."""
    return timeout * _SILENCE


def awake_clock(timeout: float) -> AwakeClock:
    """The clock of a server whose peers are lost after `silence_limit`."""
    return AwakeClock(silence_limit(timeout) / 2)


def ping_interval(timeout: float) -> float:
    """Seconds between two signs of life: often enough that several may go missing."""
    return min(timeout / _PINGS, _MAX_PING_S)


def make_manifest(config: EngineConfig, pool: UnifiedKVPool) -> Manifest:
    """What an engine's pages mean."""
    layers = range(config.model.layer_num)
    return Manifest(
        sub_pools=tuple(
            SubPoolManifest(
                name=name,
                page_bytes=pool.page_bytes(name),
                page_size=pool.page_size,
                layers=tuple(layer for layer in layers if config.model.is_window(layer) == windowed),
                dtype=config.model.kv_dtype,
            )
            for name, windowed in ((FULL, False), (WINDOW, True))
        )
    )


def describe_model(model: ModelConfig) -> str:
    """A model's sizes and seed, in one line that two processes can compare."""
    return msgspec.json.encode(model).decode()


def describe_pages(pool: UnifiedKVPool) -> dict[str, ArenaPages]:
    """Where each sub-pool's pages lie now."""
    return {name: ArenaPages(pool.page_address(name, 0), pool.num_pages(name)) for name in (FULL, WINDOW)}


def check_peer(channel: PageChannel, model: ModelConfig, pages: bytes, their_model: str) -> None:
    """Whether a peer's pages, transfer engine and model are ours.

    Parameters
    ----------
    channel : PageChannel
        Of this side.
    model : ModelConfig
        Of this side.
    pages : bytes
        The peer's hello, as its page channel encoded it.
    their_model : str
        From the peer's `describe_model`.

    Raises
    ------
    ManifestMismatch
        Naming all that differs, with both values.
    """
    differences: list[Difference] = []
    try:
        theirs = msgspec.msgpack.decode(pages, type=PeerPages)
        channel.manifest.check(theirs.manifest)
        if theirs.engine != channel.engine.name:
            differences.append(Difference("transfer engine", channel.engine.name, theirs.engine))
    except ManifestMismatch as error:
        differences += error.differences
    except (msgspec.MsgspecError, RecursionError) as error:
        differences.append(Difference("pages", "a description of pages", str(error)))
    ours = describe_model(model)
    if ours != their_model:
        differences += _model_differences(ours, their_model)
    if differences:
        raise ManifestMismatch(differences)


def _model_differences(ours: str, theirs: str) -> list[Difference]:
    try:
        mine, other = msgspec.json.decode(ours), msgspec.json.decode(theirs, type=dict)
    except (msgspec.DecodeError, RecursionError) as error:
        return [Difference("model", ours, str(error))]
    names = sorted(mine.keys() | other.keys())
    return [
        Difference(f"model.{name}", mine.get(name), other.get(name))
        for name in names
        if mine.get(name) != other.get(name)
    ]
