"""Who sizes a model's pool after capture in SGLang today: kvarena, SGLang itself, or nobody.

It follows the refusals of the plugin (`kvarena.pool.refusals`, ``kvarena.plugin.engines.sglang.planner``)
as far as a model's file and a plan's options decide them; what only a running server shows (Ray, the memory
saver, custom pools) is in ``docs/engines/sglang.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvarena.plugin.commands.plan.geometry import ModelGeometry, Span
from kvarena.plugin.commands.plan.sglang_reserve import ServerShape

__all__ = ["GAINS", "Verdict", "gain_table", "judge"]

#: What the operator sets.
FLAGS = "KVARENA_ENABLE=1, --enable-unified-memory"
EXPERIMENT = "KVARENA_SGLANG_EXPERIMENTAL=1"
STOCK_FLAG = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1"
_FULL_SUPPORT = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
_EXPERIMENTAL = ("0.5.17", "0.5.18", "0.5.19")

#: Which models and flags gain what in which release today; the same table stands in README.md,
#: docs/quickstart.md and docs/plan.md.
GAINS = (
    (
        "hybrid window models: gpt-oss, Gemma 4, Llama 4, MiMo V2, Step 3.5, Laguna, Mellum, Inkling",
        FLAGS,
        "0.5.20 to 0.5.23",
        "sized after capture, PD included",
    ),
    ("Granite SWA, Muse Glimmer", FLAGS, "0.5.20 to 0.5.23", "the same"),
    ("Gemma Diffusion, IQuest Q1", FLAGS, "0.5.21 to 0.5.23", "the same"),
    (
        "the first line's models",
        f"{FLAGS}, {EXPERIMENT}",
        "0.5.17 to 0.5.19",
        "sized after capture, without PD",
    ),
    (
        "plain attention: Llama, Mistral, Qwen, Phi, Gemma 2 and 3 (their windows keep every token)",
        "any",
        "any",
        f"nothing: kvarena refuses it; SGLang sizes the pool after capture itself with {STOCK_FLAG}",
    ),
    (
        "MLA: DeepSeek, Kimi, GLM 4.7 Flash, MiniCPM3",
        "any",
        "any",
        "nothing: kvarena refuses it, SGLang sizes the pool before capture",
    ),
    (
        "recurrent states: Qwen3-Next, Nemotron-H, Granite 4 H, Falcon H1, Kimi Linear, LFM2",
        "any",
        "any",
        "nothing: kvarena refuses it, SGLang keeps its reserve",
    ),
    (
        "any, with FP4 KV, drafts, pipeline stages, or steps without graphs",
        "any",
        "any",
        "nothing: kvarena refuses it",
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who sizes a pool after capture.

    Parameters
    ----------
    by : str or None
        ``"kvarena"``, ``"sglang"``, or ``None`` where it is sized before capture.
    flags : str
        What turns that on.
    reasons : tuple of str
        Why kvarena does not.
    """

    by: Literal["kvarena", "sglang"] | None
    flags: str = ""
    reasons: tuple[str, ...] = ()


def judge(
    model: ModelGeometry,
    server: ServerShape,
    release: str,
    *,
    hybrid_window: bool,
    kv_dtype: str = "bfloat16",
    drafts: bool = False,
) -> Verdict:
    """Who sizes the pool of a model after capture, in a release of SGLang.

    Parameters
    ----------
    model : ModelGeometry
        As SGLang allocates it.
    server : ServerShape
        The server's settings.
    release : str
        SGLang's.
    hybrid_window : bool
        Whether SGLang gives the window layers a pool of their own.
    kv_dtype : str
        Of the cache.
    drafts : bool
        Whether the server drafts tokens, whatever `server` says.
    """
    role = server.disaggregation_mode
    spans = {layer.span for layer in model.layers if layer.row is not None}
    reasons = []
    if release not in (*_FULL_SUPPORT, *_EXPERIMENTAL):
        reasons.append(f"kvarena only corrects the planner of {release}; use 0.5.20 or later")
    if release in _EXPERIMENTAL and role != "null":
        reasons.append(f"SGLang {release} refuses prefill and decode servers with a unified pool")
    if model.mla:
        reasons.append("it keeps MLA latents, whose pool has no resize")
    if model.recurrent:
        reasons.append("it keeps recurrent states, whose pool has no resize")
    if not model.mla and not model.recurrent and (not hybrid_window or Span.FULL not in spans):
        reasons.append(
            "its layers are not full and window attention in pools of their own, and kvarena sizes unified "
            "pools of such models only"
        )
    if kv_dtype.startswith("fp4"):
        reasons.append("FP4 KV has scale buffers beside the pool")
    uncaptured = []
    if role != "decode" and (not server.prefill_graph or server.pp > 1):
        why = "with pipeline stages" if server.prefill_graph else "with --disable-prefill-graph"
        uncaptured.append(f"SGLang captures no prefill steps {why}")
    if role != "prefill" and not server.decode_graph:
        uncaptured.append("SGLang captures no decode steps with --disable-decode-graph")
    reasons += [f"{what}, so their activations are not in what is measured" for what in uncaptured]
    if drafts or server.draft_tokens:
        reasons.append("a draft's pool would be charged twice")
    if not reasons:
        flags = FLAGS if release in _FULL_SUPPORT else f"{FLAGS}, {EXPERIMENT}"
        return Verdict("kvarena", flags)
    if model.mla or model.recurrent or kv_dtype.startswith("fp4") or uncaptured:
        return Verdict(None, "", tuple(reasons))
    return Verdict("sglang", STOCK_FLAG, tuple(reasons))


def gain_table() -> str:
    """`GAINS` as the Markdown table that the documentation holds."""
    head = ("models", "flags", "SGLang", "what kvarena gains")
    rows = [head, ("---",) * len(head), *GAINS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
