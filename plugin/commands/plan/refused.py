"""Models that keep no cache per token, or one whose size cannot be read, told by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarena.plugin.commands.plan.class_defaults import is_known_decoder
from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.fields import Fields

__all__ = ["refuse_unplanned"]

#: Keys of caches that are neither a row per token nor a state per request, and what they are.
_NOT_PLANNED = {
    "compress_ratios": "compressed sparse attention keeps several caches of its own",
    "kv_reuse_group": "layers reuse each other's KV in a way that is not known here",
    "kv_reuse_every_i_layer": "layers reuse each other's KV in a way that is not known here",
    "kv_sharing_map": "layers reuse each other's KV in a way that is not known here",
    "mb_per_layer": "half of the layers read one shared cache",
    "efficient_attention_config": "its layers' states are not known here",
    "conv_window": "its attention keeps convolution states that are not known here",
    "zaya_layers": "its attention keeps convolution states that are not known here",
    "cca": "its attention keeps convolution states that are not known here",
    "use_sconv": "every layer keeps convolution states that are not known here",
    "ple_layer_ids": "those layers keep convolution states that are not known here",
    # Flash-linear-attention's families and the first Mamba's own files; both may name heads, too.
    **dict.fromkeys(("expand_k", "expand_v", "use_short_conv", "ssm_cfg"), "its states are not known here"),
}

#: Model types without attention whose state is not known here, though some files have heads.
_OTHER_MIXERS = ("rwkv", "retnet", "xlstm", "gla", "hgrn", "delta_net")

#: Encoders whose files say so by nothing but their name.
_ENCODERS = (
    *("clip", "clipseg", "data2vec", "distilbert", "esm", "eurobert", "hubert", "metaclip", "modernbert"),
    *("mpnet", "sew", "siglip", "tapas", "unispeech", "wav2vec2", "wavlm"),
)


def refuse_unplanned(fields: Fields, top: Mapping[str, Any]) -> None:
    """Refuse what is no decoder, and what keeps something else than rows and states.

    Parameters
    ----------
    fields : Fields
        The object that describes the language model.
    top : Mapping
        The whole file: a wrapper may say what its decoder does not.

    Raises
    ------
    ModelConfigError
        The key that says so.
    """
    _refuse_encoder_decoder(fields, top)
    _refuse_encoder(fields)
    if fields.model_type.startswith(_OTHER_MIXERS):
        raise ModelConfigError(
            "model_type",
            f"is {fields.model_type[:40]}: its layers keep a state that is not known here",
            fix="Give the geometry by options.",
        )
    if (fields.count("key_value_group_size", minimum=0) or 0) > 1:  # SwiftKV; groups of 1 share nothing
        why = "layers of a group share one cache, and which they are is not known here"
        raise fields.error("key_value_group_size", f"is above 1: {why}", fix="Give the geometry by options.")
    for key, why in _NOT_PLANNED.items():
        if fields.raw(key):
            raise fields.error(key, f"is there: {why}", fix="Give the geometry by options.")


def _refuse_encoder_decoder(fields: Fields, top: Mapping[str, Any]) -> None:
    what, fix = "cross-attention caches are not planned", "Plan a decoder."
    if fields.flag("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", f"is true: {what}", fix=fix)
    if top.get("is_encoder_decoder") is True:
        raise ModelConfigError("is_encoder_decoder", f"is true: {what}", fix=fix)
    for key, other in (("num_decoder_layers", ""), ("decoder_layers", "encoder_layers")):
        if fields.stated(key) and (not other or fields.stated(other)):
            raise fields.error(key, f"is there, so this is an encoder and a decoder: {what}", fix=fix)


def _refuse_encoder(fields: Fields) -> None:
    """An encoder sees a text, an image or a sound at once, and keeps nothing of it."""
    what, fix = "an encoder, which keeps no KV cache", "Plan a decoder."
    if fields.stated("is_decoder") and fields.flag("is_decoder"):
        return
    listed = fields.raw("architectures")
    architectures = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    # Tiny models made for tests have BERT's keys, whatever they are.
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if fields.stated("type_vocab_size") and not generates and not is_known_decoder(fields.model_type):
        raise fields.error("type_vocab_size", f"is there, so this is {what}", fix=fix)
    if fields.stated("patch_size") and not fields.stated("vocab_size"):
        raise fields.error("patch_size", f"is there without vocab_size, so this is {what}", fix=fix)
    for name in architectures:
        if name.endswith("ForMaskedLM"):
            raise fields.error("architectures", f"has {name[:60]}: {what}", fix=fix)
    name = fields.model_type
    by_name = name.startswith(_ENCODERS) and "decoder" not in name
    if by_name or name.endswith(("_encoder", "_vision_model")):
        raise ModelConfigError("model_type", f"is {name[:40]}: {what}", fix=fix)
