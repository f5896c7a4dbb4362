"""How large a model's weights are, from its configuration, where nobody says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.fields import MAX_DIM, MAX_TOKENS, Fields
from kvarena.plugin.commands.plan.geometry import KVRow, LayerCache, MLARow
from kvarena.plugin.commands.plan.kinds import HEAD_KEYS
from kvarena.plugin.commands.plan.kv_dtype import quantization_of
from kvarena.plugin.commands.plan.mlp import mlp_parameters
from kvarena.plugin.commands.plan.read import ReadModel
from kvarena.plugin.commands.plan.rows import HIDDEN_KEYS
from kvarena.plugin.commands.plan.text import printable

__all__ = ["WeightEstimate", "estimate_weights"]


#: How far the estimate was off for the published models of the tests, and what it never counts.
_LOW, _HIGH = 0.97, 1.08


@dataclass(frozen=True, slots=True)
class WeightEstimate:
    """Bytes of a model's weights, by the stage that holds them.

    Parameters
    ----------
    embedding, head : int
        Bytes of the embedding (first stage) and of the output head (last stage; 0 where tied).
    layers : tuple of int
        Bytes of each layer.
    towers : int
        Bytes of image and sound towers, and of per-layer embeddings (first stage).
    parameters : int
        Parameters altogether.
    bits : str
        What was taken for their width, in words.
    attention : int
        Bytes of the layers' attention and state mixers, which attention data parallelism does not split.
    least_bits, most_bits : float
        The narrowest and widest that the layers may be, as shares of what was taken; 1 where the file
        says their width.
    """

    embedding: int
    head: int
    layers: tuple[int, ...]
    parameters: int
    bits: str
    towers: int = 0
    attention: int = 0
    least_bits: float = 1.0
    most_bits: float = 1.0

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.towers + sum(self.layers)

    @property
    def low(self) -> int:
        """The least that the weights may take: what the estimate leaves out is nothing."""
        return int((self.total - sum(self.layers)) * _LOW + sum(self.layers) * _LOW * self.least_bits)

    @property
    def high(self) -> int:
        """The most: norms, biases, scales, projectors and padding that the estimate leaves out."""
        return int((self.total - sum(self.layers)) * _HIGH + sum(self.layers) * _HIGH * self.most_bits)

    def stage(self, layers: range) -> int:
        """Bytes of one pipeline stage."""
        nbytes = sum(self.layers[index] for index in layers)
        if layers.start == 0:
            nbytes += self.embedding + self.towers
        if layers.stop == len(self.layers):
            # A tied head is the embedding once more, on a stage of its own.
            nbytes += self.head or (self.embedding if layers.start else 0)
        return nbytes


@dataclass(frozen=True, slots=True)
class _Widths:
    """Bytes of a parameter by what it belongs to."""

    plain: float
    attention: float
    dense: float
    expert: float
    words: str
    least: float = 1.0
    most: float = 1.0


def estimate_weights(model: ReadModel, *, towers: bool = True) -> WeightEstimate | None:
    """Estimate the weights, or ``None`` where the file leaves out what that needs.

    Read the model with a release of SGLang, so that layers which use another layer's KV have their
    attention, too.

    Parameters
    ----------
    model : ReadModel
        The model.
    towers : bool
        Whether image and sound towers are loaded.
    """
    fields = model.fields
    try:
        hidden = fields.need(*HIDDEN_KEYS)
        vocabulary = fields.count("vocab_size", "padded_vocab_size", maximum=MAX_TOKENS)
        widths = _widths(fields, model.top)
        parameters = attention = 0
        sizes = []
        for index, layer in enumerate(model.geometry.layers):
            mixers = _attention_parameters(fields, layer, hidden) + _state_parameters(layer, hidden)
            dense, experts = mlp_parameters(fields, index, len(model.geometry.layers), layer, hidden)
            per_layer = 2 * hidden * (fields.count("hidden_size_per_layer_input", minimum=0) or 0)
            mixers += per_layer  # its gate and its projection
            parameters += mixers + dense + experts
            attention += int(mixers * widths.attention)
            sizes.append(int(mixers * widths.attention + dense * widths.dense + experts * widths.expert))
    except ModelConfigError:
        return None
    embedding = (vocabulary or 0) * hidden
    tied = fields.flag("tie_word_embeddings")
    if tied is None:
        # The default of the base class was true until transformers 5; small models rely on it.
        tied = fields.model_type.startswith(("gemma", "cohere", "lfm2", "minicpm"))
    parameters += embedding * (1 if tied else 2)
    beside = _per_layer_embeddings(fields, len(sizes), hidden)
    beside += _tower_parameters(model.top) if towers else 0
    parameters += beside
    return WeightEstimate(
        embedding=int(embedding * widths.plain),
        head=0 if tied else int(embedding * widths.plain),
        layers=tuple(sizes),
        parameters=parameters,
        bits=widths.words,
        towers=int(beside * widths.plain),
        attention=attention,
        least_bits=widths.least,
        most_bits=widths.most,
    )


def _per_layer_embeddings(fields: Fields, layers: int, hidden: int) -> int:
    """Gemma 3n and 4 embed each token once more for every layer, and project the common one to them."""
    width = fields.count("hidden_size_per_layer_input", minimum=0)
    if not width:
        return 0
    vocabulary = fields.count("vocab_size_per_layer_input", maximum=MAX_TOKENS)
    vocabulary = vocabulary or fields.count("vocab_size", maximum=MAX_TOKENS) or 0
    return layers * width * (vocabulary + hidden)


def _tower_parameters(top: Any) -> int:
    """Parameters of the image and sound towers that a wrapper's file describes, without their projectors."""
    total = 0
    for key in ("vision_config", "audio_config"):
        tower = top.get(key)
        if not isinstance(tower, dict):
            continue
        layers, hidden, width = (
            next((tower[name] for name in names if _is_size(tower.get(name))), 0)
            for names in (
                ("num_hidden_layers", "depth", "layers", "conf_num_hidden_layers", "encoder_layers"),
                ("hidden_size", "embed_dim", "width", "d_model"),
                ("intermediate_size", "encoder_ffn_dim"),
            )
        )
        total += layers * (4 * hidden * hidden + 2 * hidden * (width or 4 * hidden))
    return total


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_DIM


def _attention_parameters(fields: Fields, layer: LayerCache, hidden: int) -> int:
    row = layer.row
    if row is None:
        return 0
    heads = fields.need(*HEAD_KEYS)
    if isinstance(row, MLARow):
        rope = row.qk_rope_head_dim
        nope = fields.count("qk_nope_head_dim") or 128
        value = fields.count("v_head_dim", minimum=0) or hidden // heads
        query = heads * (nope + rope)
        query_rank = fields.count("q_lora_rank")
        first = hidden * query if query_rank is None else query_rank * (hidden + query)
        latent = hidden * (row.kv_lora_rank + rope) + row.kv_lora_rank * heads * (nope + value)
        return first + latent + heads * value * hidden
    return _head_parameters(row, heads, hidden)


def _head_parameters(row: KVRow, heads: int, hidden: int) -> int:
    query_and_output = heads * (row.head_dim + row.v_head_dim)
    return hidden * (query_and_output + row.kv_heads * (row.head_dim + row.v_head_dim))


def _state_parameters(layer: LayerCache, hidden: int) -> int:
    state = layer.state
    if state is None:
        return 0
    conv = state.inner + state.groups * state.group_width
    # A projection in (the convolved channels and a gate of the inner width) and one out; the rest
    # (time steps, decays, norms) is small.
    return hidden * (conv + state.inner + state.heads) + state.inner * hidden + conv * (state.taps + 1)


def _widths(fields: Fields, top: Any) -> _Widths:
    """Bytes per parameter, as the file's quantization says."""
    quantization = quantization_of(fields, top)
    plain = 2.0
    if quantization is None:
        return _Widths(plain, plain, plain, plain, "16 bits")
    named = quantization.get("quant_method")
    method = printable(named.lower(), 40) if isinstance(named, str) else ""
    lists = (quantization.get(key) for key in ("modules_to_not_convert", "ignore", "exclude_modules"))
    listed = next(filter(None, lists), None)
    ignored = " ".join(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else ""
    if (mixed := _mixed_bits(quantization)) is not None:
        width = mixed / 8
        words = f"{mixed:g} bits on average (mixed precision)"
        return _Widths(plain, width, width, width, words, _MODELOPT_BITS["NVFP4"] / mixed, 16 / mixed)
    bits, words = _bits(quantization, method)
    unknown = "is not counted" in words
    width = bits / 8
    attention = plain if "attn" in ignored else width
    dense = plain if "mlp" in ignored or "mxfp4" in method else width
    return _Widths(plain, attention, dense, width, words, 0.25 if unknown else 1.0)


#: ModelOpt's names; NVFP4 has an fp8 scale for each 16.
_MODELOPT_BITS = {"FP8": 8.0, "NVFP4": 4.5}


def _mixed_bits(quantization: dict[str, Any]) -> float | None:
    """The mean bits of ModelOpt's ``MIXED_PRECISION``, or ``None`` where one width is for all."""
    algorithm = quantization.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() != "MIXED_PRECISION":
        return None
    layers = quantization.get("quantized_layers")
    records = layers.values() if isinstance(layers, dict) else ()
    named = [record.get("quant_algo") for record in records if isinstance(record, dict)]
    found = [_MODELOPT_BITS[name] for name in named if isinstance(name, str) and name in _MODELOPT_BITS]
    # Without a list it is a mixture of the two that ModelOpt writes.
    return sum(found) / len(found) if found else sum(_MODELOPT_BITS.values()) / len(_MODELOPT_BITS)


def _bits(quantization: dict[str, Any], method: str) -> tuple[float, str]:
    """Bits of a quantized parameter, scales among them."""
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0, "8 bits (fp8)"
    if method == "mxfp4":
        return 4.25, "4.25 bits (mxfp4)"
    algorithm = quantization.get("quant_algo")
    if isinstance(algorithm, str) and algorithm in _MODELOPT_BITS:
        return _MODELOPT_BITS[algorithm], f"{_MODELOPT_BITS[algorithm]:g} bits ({algorithm})"
    found = quantization.get("bits")
    groups = quantization.get("config_groups")
    size = quantization.get("group_size")
    if isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                found, size = weights.get("num_bits", found), weights.get("group_size", size)
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= 16:
        return 16.0, f"16 bits ({method or 'an unknown'} quantization is not counted)"
    scales = 16 / size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0.0
    return found + scales, f"{found + scales:g} bits ({method})"
