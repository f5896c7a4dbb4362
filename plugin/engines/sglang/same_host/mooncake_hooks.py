"""``KVARENA_SAME_HOST=1``: the same-host engine behind SGLang's Mooncake engine object.

SGLang goes on to call ``batch_transfer_sync`` with a session and addresses. What lies in our arena and in
the arena of a peer on this host is copied through mapped memory; everything else goes to Mooncake, in
the same call. SGLang flips no switch and sends nothing else than before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarena.plugin.engines.sglang.applied import handlers_of
from kvarena.plugin.engines.sglang.bound import SglangPool
from kvarena.plugin.engines.sglang.families.shapes import differences, resolve
from kvarena.plugin.engines.sglang.families.targets import Shape, Target
from kvarena.plugin.engines.sglang.runtime import logger, runtime
from kvarena.plugin.engines.sglang.same_host.transfers import SameHostTransfers
from kvarena.transfer import RegistrationLedger

__all__ = [
    "batch_transfer_sync",
    "hook_targets",
    "register_hooks",
    "send",
    "start_transfers",
    "stop_transfers",
    "transfer_sync",
]

_ATTRIBUTE = "_kvarena_same_host"
_CONN = "sglang.srt.disaggregation.mooncake.conn"
_WRAPPER = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine"

TRANSFERS = (
    Target(
        f"{_WRAPPER}.batch_transfer_sync",
        "self, session_id, buffers, peer_buffer_addresses, lengths",
        handler="same_host.mooncake_hooks:batch_transfer_sync",
    ),
    Target(
        f"{_WRAPPER}.transfer_sync",
        "self, session_id, buffer, peer_buffer_address, length",
        handler="same_host.mooncake_hooks:transfer_sync",
    ),
)
#: Up to 0.5.21, the Mooncake sender drops the event that says when a cached prefix has been written. The
#: handler passes every argument on, so the signature (which a decorator hides) does not matter.
EARLY_SEND = Target(
    f"{_CONN}.MooncakeKVSender.send", "self, *args, **kwargs", handler="same_host.mooncake_hooks:send"
)
_NEEDS = (Shape(f"{_WRAPPER}.get_session_id", "self"),)
_REQUEST = f"{_CONN}.MooncakeKVManager.add_transfer_request"


def hook_targets() -> tuple[Target, ...]:
    """What is hooked in this release: by what its code offers. Raises `LookupError`."""
    import inspect

    try:
        waits = "wait_event" in inspect.signature(resolve(_REQUEST)).parameters
    except (TypeError, ValueError) as error:
        raise LookupError(f"{_REQUEST} has no signature ({error})") from error
    resolve(EARLY_SEND.path)
    return TRANSFERS if waits else (*TRANSFERS, EARLY_SEND)


def register_hooks(registry: Any, around: Any) -> None:
    """Register with SGLang's `HookRegistry`; on a release of another shape, say so and do nothing."""
    try:
        targets = hook_targets()
    except LookupError as error:
        logger.warning("kvarena: KVARENA_SAME_HOST has no effect: %s.", error)
        return
    assert runtime.family is not None
    found = differences(runtime.family, shapes=(*TRANSFERS, *_NEEDS))
    if found:
        logger.warning("kvarena: KVARENA_SAME_HOST has no effect in this release: %s.", "; ".join(found))
        return
    for target in targets:
        handler = _handler(target)
        if not any(hook is handler for _, hook, _ in registry._hooks.get(target.path, ())):
            registry.register(target.path, handler, around)


def batch_transfer_sync(
    original: Callable[..., int],
    self: Any,
    session_id: str,
    buffers: list[int],
    peer_buffer_addresses: list[int],
    lengths: list[int],
) -> int:
    """Around ``MooncakeTransferEngine.batch_transfer_sync``: 0 only when every byte is there."""
    transfers = transfers_of(self)
    if transfers is None:
        return original(self, session_id, buffers, peer_buffer_addresses, lengths)
    return transfers.transfer(
        lambda src, dst, counts: original(self, session_id, src, dst, counts),
        session_id,
        buffers,
        peer_buffer_addresses,
        lengths,
    )


def transfer_sync(
    original: Callable[..., int],
    self: Any,
    session_id: str,
    buffer: int,
    peer_buffer_address: int,
    length: int,
) -> int:
    """Around ``MooncakeTransferEngine.transfer_sync``: a batch of one."""
    transfers = transfers_of(self)
    if transfers is None:
        return original(self, session_id, buffer, peer_buffer_address, length)
    return transfers.transfer(
        lambda src, dst, counts: original(self, session_id, src[0], dst[0], counts[0]),
        session_id,
        [buffer],
        [peer_buffer_address],
        [length],
    )


def send(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``MooncakeKVSender.send``: keep the event that SGLang hands over for a cached prefix.

    Its pages may still be written by the step before. Releases up to 0.5.21 give the event to every
    sender, but only that of MoRI waits for it; a slow network hides that, a copy at once would not.
    """
    event = getattr(self, "_early_send_wait_event", None)
    transfers = None if event is None else transfers_of(getattr(self.kv_mgr, "engine", None))
    if transfers is not None:
        self._early_send_wait_event = None
        transfers.await_event(event)
    return original(self, *args, **kwargs)


def start_transfers(manager: Any, bound: SglangPool, mooncake: RegistrationLedger) -> None:
    """Put same-host transfers behind the Mooncake engine of a manager that has registered. Never raises.

    Parameters
    ----------
    manager : MooncakeKVManager
        SGLang's.
    bound : SglangPool
        The pool whose arena it serves.
    mooncake : RegistrationLedger
        Of the same arena with Mooncake; what Mooncake carries is counted there.
    """
    settings = runtime.settings
    if settings is None or not settings.same_host:
        return
    engine = manager.engine
    try:
        stop_transfers(manager)
        unhooked = _not_applied()
        if unhooked:
            logger.warning(
                "kvarena: KVARENA_SAME_HOST has no effect, Mooncake carries everything: %s.",
                "; ".join(unhooked),
            )
            return
        role = getattr(getattr(manager, "disaggregation_mode", None), "value", None)
        transfers = SameHostTransfers(
            bound, str(engine.get_session_id()), mooncake.traffic, settings, sends=role != "decode"
        )
        setattr(engine, _ATTRIBUTE, transfers)
    except Exception as error:  # noqa: BLE001 - an accelerator must not keep a server from starting
        logger.warning(
            "kvarena: no same-host transfers, Mooncake carries everything: %s",
            error,
            exc_info=not _is_ours(error),
        )


def stop_transfers(manager: Any) -> None:
    """Take the same-host transfers away, when a KV manager unregisters.

    Raises
    ------
    RegistrationError, QuiesceTimeout
        Peers or copies hold the memory still.
    """
    transfers = transfers_of(manager.engine)
    if transfers is not None:
        delattr(manager.engine, _ATTRIBUTE)
        transfers.close()


def transfers_of(engine: Any) -> SameHostTransfers | None:
    """The same-host transfers behind one of SGLang's Mooncake engine objects."""
    transfers = getattr(engine, "__dict__", {}).get(_ATTRIBUTE)
    return transfers if isinstance(transfers, SameHostTransfers) else None


def _not_applied() -> list[str]:
    """Hooks that SGLang did not apply: it logs what goes wrong there, and goes on."""
    return [
        f"the hook on {target.path} was not applied"
        for target in hook_targets()
        if _handler(target) not in handlers_of(resolve(target.path))
    ]


def _handler(target: Target) -> Any:
    return globals()[target.handler.partition(":")[2]]


def _is_ours(error: Exception) -> bool:
    from kvarena.errors import KvArenaError

    return isinstance(error, KvArenaError)
