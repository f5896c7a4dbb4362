"""kvarena inside SGLang: an entry point of the group ``sglang.srt.plugins``.

SGLang calls `register` once in every process (launcher, each scheduler; since 0.5.22 also the detokenizer
and the data-parallel controller). Unless ``KVARENA_ENABLE`` is set, it does nothing.
"""

from __future__ import annotations

import logging

__all__ = ["register"]


def register() -> None:
    """Attach kvarena to SGLang, or say in one line why not. Never raises; a second call does nothing."""
    from kvarena.errors import KvArenaError

    log = logging.getLogger("kvarena.sglang")
    try:
        from kvarena.plugin.engines.sglang.attach import attach

        attach()
    except KvArenaError as error:
        log.error("kvarena: not attached, SGLang runs unmodified: %s", error)
    except Exception:
        log.exception("kvarena: not attached, SGLang runs unmodified.")
