"""The keys that sparse attention keeps per token, beside what it attends to, to choose from."""

from __future__ import annotations

from kvarena.plugin.commands.plan.fields import MAX_LAYERS, Fields
from kvarena.plugin.commands.plan.geometry import IndexRow

__all__ = ["index_rows"]


def index_rows(fields: Fields, layers: int, *, mla: bool) -> list[IndexRow | None]:
    """Each layer's index key, or ``None`` where it keeps none.

    Raises
    ------
    ModelConfigError
        An indexer whose keys' size is not said, or is not known for this attention.
    """
    if fields.count("index_topk") is not None:
        return _beside_latent(fields, layers, mla)
    block = fields.block("sparse_attention_config")
    if block is not None and block.flag("use_sparse_attention") is not False:
        return _beside_heads(block, layers)
    return [None] * layers


def _beside_latent(fields: Fields, layers: int, mla: bool) -> list[IndexRow | None]:
    """DeepSeek V3.2 and its like: fp8 with an fp32 scale per block of 128, the same on every rank.

    Whatever the KV dtype; `index_kpool` tokens share one key (SGLang 0.5.23, ``DSATokenToKVPool``).
    """
    if not mla:
        raise fields.error(
            "index_topk",
            "is there without kv_lora_rank: what its indexer keeps beside plain heads is not known here",
            fix="Give the geometry by options.",
        )
    head_dim = fields.need("index_head_dim", why="index_topk is there, so the indexer has keys")
    shared = fields.count("index_kpool", maximum=4096) or 1
    row = IndexRow(-(-(head_dim + head_dim // 128 * 4) // shared))
    fields.note("The sparse-attention indexer keeps an fp8 key per token beside the latent.")
    owners = _owners(fields, layers)
    return [row if owner else None for owner in owners]


def _owners(fields: Fields, layers: int) -> list[bool]:
    """Layers that search; the others use the answer of one before them."""
    types = fields.items("indexer_types")
    if types:
        if len(types) < layers:
            raise fields.error("indexer_types", f"has {len(types)} entries for {layers} layers")
        return [kind != "shared" for kind in types[:layers]]
    pattern = fields.text("index_topk_pattern")
    if pattern and len(pattern) == layers:
        return [letter != "S" for letter in pattern]
    every = fields.count("index_topk_freq")
    if every is None:
        return [True] * layers
    offset = fields.count("index_skip_topk_offset", minimum=0, maximum=MAX_LAYERS)
    first = 2 if offset is None else offset
    return [max(layer - first + 1, 0) % every == 0 for layer in range(layers)]


def _beside_heads(block: Fields, layers: int) -> list[IndexRow | None]:
    """MiniMax M3: a key in the model's 16 bits in each sparse layer, and a value where it is not disabled."""
    flags = block.items("sparse_attention_freq")
    if not flags:
        return [None] * layers
    head_dim = block.need("sparse_index_dim", why="some layers are sparse, so their indexers have keys")
    without_value = block.items("sparse_disable_index_value") or [0] * layers
    for key, values in (("sparse_attention_freq", flags), ("sparse_disable_index_value", without_value)):
        if len(values) < layers:
            raise block.error(key, f"has {len(values)} entries for {layers} layers")
        for value in values:
            block.whole(key, value, minimum=0, maximum=MAX_LAYERS)
    block.note("Sparse layers keep an index key per token, in 16 bits, beside their heads.")
    return [
        IndexRow((1 if alone else 2) * head_dim * 2) if sparse else None
        for sparse, alone in zip(flags[:layers], without_value[:layers], strict=True)
    ]
