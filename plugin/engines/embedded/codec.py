"""Control messages as bytes: what may arrive on a channel, how large it may be, and what is dropped."""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.embedded.control import Channel, Message

__all__ = ["Codec", "MessageTooLarge"]

logger = logging.getLogger(__name__)

_encoder: Final = msgspec.msgpack.Encoder()
_WARN_EVERY_S: Final = 10.0


class MessageTooLarge(KvArenaError):
    """A message that its receiver would not take."""


class Codec:
    """Encodes what one side of a channel sends, and decodes what it receives.

    Parameters
    ----------
    sends, receives : Channel
        The kinds of messages of each direction.
    """

    def __init__(self, sends: Channel, receives: Channel) -> None:
        self.sends = sends
        self.receives = receives
        self.dropped = 0
        """Messages that could not be read."""
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(receives.messages)
        self._warned_at = -_WARN_EVERY_S
        self._warned_of = 0

    def encode(self, message: Message) -> bytes:
        """A message's bytes. Raises `MessageTooLarge` where the other side would end the connection."""
        body = _encoder.encode(message)
        if len(body) > self.sends.max_bytes:
            raise MessageTooLarge(
                f"a {type(message).__name__} message has {len(body)} bytes, the limit is "
                f"{self.sends.max_bytes}."
            )
        return body

    def decode(self, frames: list[bytes]) -> Message | None:
        """The message, or None for one that does not belong here: a peer must not be able to end us."""
        try:
            if len(frames) != 1:
                raise msgspec.DecodeError(f"it has {len(frames)} frames instead of 1")
            return self._decoder.decode(frames[0])
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, as is bad UTF-8
            self._drop(error)
            return None

    def _drop(self, error: Exception) -> None:
        """Say so, but no more than once in ten seconds: a peer must not be able to fill the log."""
        self.dropped += 1
        if time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            logger.warning(
                "dropped %d control messages that are not %s; the last one: %.200s",
                self.dropped - self._warned_of,
                self.receives.name,
                ascii(str(error))[1:-1],
            )
            self._warned_at, self._warned_of = time.monotonic(), self.dropped
