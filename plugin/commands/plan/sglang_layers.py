"""Which layers SGLang keeps KV for, and for how long: what it allocates, not what the model needs.

Read in ``srt/configs/model_config.py`` (``is_hybrid_swa_model``, ``get_hybrid_layer_ids``) and
``srt/model_executor/pool_configurator.py`` of the wheels of 0.5.17 and 0.5.20 to 0.5.23, and compared with
them in ``tests/sglang/test_plan_counts.py``. 0.5.16, and 0.5.18 and 0.5.19, are taken for 0.5.17 and
0.5.20's neighbour below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvarena.plugin.commands.plan.kinds import LayerKind

__all__ = ["SglangCount", "architectures_of", "count_as_sglang", "is_hybrid_window"]

_FROM_0_5_17 = frozenset(
    {
        "GptOssForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "InklingForConditionalGeneration",
        "LagunaForCausalLM",
        "Llama4ForConditionalGeneration",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
        "UnlimitedOCRForCausalLM",
    }
)
_FROM_0_5_20 = _FROM_0_5_17 | {
    "GraniteMoeSWAForCausalLM",
    "GraniteSWAForCausalLM",
    "MuseGlimmerForCausalLM",
    "MuseGlimmerForConditionalGeneration",
}
_FROM_0_5_21 = _FROM_0_5_20 | {"DiffusionGemmaForBlockDiffusion", "IQuestQ1ForCausalLM"}
_FROM_0_5_22 = _FROM_0_5_21 | {"EmbeddingGemma2Model"}
#: Architectures whose window layers have a pool of their own; every other model's keep every token.
HYBRID_WINDOW = {
    "0.5.16": _FROM_0_5_17,
    "0.5.17": _FROM_0_5_17,
    "0.5.18": _FROM_0_5_17,
    "0.5.19": _FROM_0_5_17,
    "0.5.20": _FROM_0_5_20,
    "0.5.21": _FROM_0_5_21,
    "0.5.22": _FROM_0_5_22,
    "0.5.23": _FROM_0_5_22 | {"BeamForCausalLM"},
}

#: What a file without architectures is served as.
_BY_MODEL_TYPE = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "mimo_v2": "MiMoV2ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "muse_glimmer": "MuseGlimmerForConditionalGeneration",
    "step3p5": "Step3p5ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class SglangCount:
    """How a release of SGLang counts a model's layers.

    Parameters
    ----------
    release : str
        The release.
    hybrid_window : bool
        Whether its window layers have a pool of their own.
    kinds : tuple of LayerKind
        What is allocated for each layer.
    notes : tuple of str
        Where that differs from what the model needs.
    """

    release: str
    hybrid_window: bool
    kinds: tuple[LayerKind, ...]
    notes: tuple[str, ...]


def architectures_of(stated: object, model_type: str) -> tuple[str, ...]:
    """A file's architectures; where it names none, the one that its model type is served as."""
    if isinstance(stated, list) and (names := tuple(name for name in stated if isinstance(name, str))):
        return names
    known = _BY_MODEL_TYPE.get(model_type)
    return (known,) if known is not None else ()


def is_hybrid_window(
    architectures: Sequence[str], kinds: Sequence[LayerKind], release: str, *, opted_in: bool = False
) -> bool:
    """Whether a release gives a model's window layers a pool of their own.

    Parameters
    ----------
    architectures : sequence of str
        As in the file.
    kinds : sequence of LayerKind
        What the model's layers need.
    release : str
        A key of `HYBRID_WINDOW`.
    opted_in : bool
        Whether the file itself says ``is_hybrid_swa``.
    """
    listed = opted_in or any(name in HYBRID_WINDOW[release] for name in architectures)
    return listed and any(kind.attention in ("sliding", "chunked") for kind in kinds)


def count_as_sglang(
    architectures: Sequence[str],
    kinds: Sequence[LayerKind],
    release: str,
    *,
    opted_in: bool = False,
    shared_layers: int = 0,
) -> SglangCount:
    """What a release allocates for a model's layers.

    Parameters
    ----------
    architectures, kinds, release, opted_in
        As for `is_hybrid_window`.
    shared_layers : int
        Layers that use an earlier layer's KV; they are allocated all the same.
    """
    hybrid = is_hybrid_window(architectures, kinds, release, opted_in=opted_in)
    named = architectures[0] if architectures else "a model that names no architecture"
    found, notes = list(kinds), []
    windowed = sum(kind.window is not None for kind in kinds)
    if windowed and not hybrid:
        found = [
            replace(kind, attention="full", window=None) if kind.window is not None else kind
            for kind in found
        ]
        notes.append(
            f"SGLang {release} keeps every token in the {windowed} window layers of {named}: it is not among "
            "the models whose windows have a pool of their own."
        )
    if shared_layers:
        notes.append(
            f"SGLang {release} allocates the {shared_layers} layers that use earlier layers' KV, too."
        )
    if not any(kind.mixer is not None for kind in kinds) and not hybrid:
        # It counts num_hidden_layers, whatever the layers do.
        without = sum(kind.attention is None for kind in found)
        if without:
            found = [replace(kind, attention=kind.attention or "full") for kind in found]
            notes.append(
                f"SGLang {release} allocates the {without} layers without attention of their own, too."
            )
    return SglangCount(release, hybrid, tuple(found), tuple(notes))
