"""What an attention layer keeps per token: heads and their sizes, or a latent."""

from __future__ import annotations

from typing import Any

from kvarena.plugin.commands.plan.fields import MAX_DIM, Fields
from kvarena.plugin.commands.plan.geometry import KVRow, MLARow
from kvarena.plugin.commands.plan.kinds import HEAD_KEYS, LayerKind

__all__ = ["HIDDEN_KEYS", "RowReader"]

HIDDEN_KEYS = ("hidden_size", "n_embd", "n_embed", "d_model")
_KV_KEYS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "num_attention_groups")
_KV_LISTS = ("num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer")


class RowReader:
    """Reads each layer's row from a model's keys; what is read once is kept."""

    def __init__(self, fields: Fields, layers: int) -> None:
        self._fields = fields
        self._layers = layers
        self._mla = self._read_mla()
        self._full: KVRow | None = None
        self._sliding: KVRow | None = None
        self._per_layer: list[int] | None = None
        if self._mla is None:
            self._per_layer = self._kv_list()

    def row(self, layer: int, kind: LayerKind) -> KVRow | MLARow:
        """The row of a layer that has attention."""
        fields = self._fields
        if self._mla is not None:
            sliding_rank = fields.count("swa_kv_lora_rank") if kind.attention == "sliding" else None
            if sliding_rank is None:
                return self._mla
            rope = fields.count("swa_qk_rope_head_dim") or self._mla.qk_rope_head_dim
            return MLARow(sliding_rank, rope)
        if self._per_layer is not None:
            heads = self._per_layer[layer]
            if heads == 0:
                raise fields.error("num_key_value_heads", f"is 0 for layer {layer}, which has attention")
            head_dim, v_head_dim = self._head_dims()
            return KVRow(heads, head_dim, v_head_dim)
        if kind.attention == "sliding":
            if self._sliding is None:
                self._sliding = self._sliding_row()
            return self._sliding
        if self._full is None:
            self._full = self._full_row()
        return self._full

    @property
    def mla(self) -> bool:
        return self._mla is not None

    def _read_mla(self) -> MLARow | None:
        fields = self._fields
        if fields.flag("use_mla") is False:
            return None
        rank = fields.count("kv_lora_rank")
        if rank is None:
            return None
        if fields.flag("use_mla_nope"):
            fields.note("use_mla_nope is true: the latent has no rope part.")
            return MLARow(rank, 0)
        rope = fields.count("qk_rope_head_dim", minimum=0)
        if rope is None:
            rope = fields.need("qk_rope_head_dim", why="kv_lora_rank is there, so this is MLA")
        return MLARow(rank, rope, fp8_scaled=fields.count("index_topk") is not None)

    def _full_row(self) -> KVRow:
        fields = self._fields
        head_dim, v_head_dim = self._head_dims()
        heads = self._kv_heads()
        wide = fields.count("global_head_dim")
        if wide is not None:
            head_dim = v_head_dim = wide
            if fields.flag("attention_k_eq_v"):
                heads = fields.count("num_global_key_value_heads") or heads
        return KVRow(heads, head_dim, v_head_dim)

    def _sliding_row(self) -> KVRow:
        """The row of a windowed layer, where its heads differ from the full ones."""
        fields = self._fields
        head_dim, v_head_dim = self._head_dims()
        heads = fields.count("swa_num_key_value_heads")
        other = fields.block("attention_other_setting")  # Step 3.5
        if heads is None and other is not None:
            heads = other.count("num_attention_groups", "num_key_value_heads")
            head_dim = other.count("head_dim") or head_dim
            v_head_dim = other.count("head_dim") or v_head_dim
        head_dim_swa = fields.count("swa_head_dim")
        if head_dim_swa is not None:
            head_dim = v_head_dim = head_dim_swa
        v_head_dim = fields.count("swa_v_head_dim") or v_head_dim
        return KVRow(heads if heads is not None else self._kv_heads(), head_dim, v_head_dim)

    def _attention_heads(self) -> int:
        return self._fields.need(*HEAD_KEYS)

    def _head_dims(self) -> tuple[int, int]:
        """Sizes of a key head and of a value head; a stated size wins over hidden / heads."""
        fields = self._fields
        head_dim = fields.count("head_dim", "attention_head_dim") or fields.count("kv_channels", "d_kv")
        if fields.model_type.startswith("zamba") and not fields.stated("attention_head_dim"):
            head_dim = self._divided(2)
            fields.note("Attention runs on twice the hidden size, as the class builds it.")
        if head_dim is None:
            head_dim = self._divided(1)
        if fields.flag("shared_kv") and fields.text("kv_cache_mode") == "shared":
            fields.note("shared_kv is true: keys and values are one tensor, kept once.")
            return head_dim, 0
        # 0 is how some files say "not used"; the engines read it so, too.
        v_head_dim = fields.count("v_head_dim", minimum=0) or head_dim
        return head_dim, v_head_dim

    def _divided(self, times: int) -> int:
        fields = self._fields
        hidden = fields.need(*HIDDEN_KEYS, why="it is needed for the head size") * times
        heads = self._attention_heads()
        if hidden % heads:
            raise fields.error(
                "head_dim",
                f"is missing, and {hidden} / {heads} heads is not a whole number",
                fix="Add head_dim.",
            )
        return hidden // heads

    def _kv_heads(self) -> int:
        fields = self._fields
        heads = fields.count(*HEAD_KEYS)
        multi_query = fields.flag("multi_query")
        if multi_query and not fields.flag("new_decoder_architecture"):
            fields.note("multi_query is true: one KV head.")
            return 1
        groups = None
        if fields.flag("multi_query_attention"):
            groups = fields.need("multi_query_group_num", why="multi_query_attention is true")
        attention = fields.block("attn_config")  # DBRX, MPT
        if attention is not None and attention.stated("kv_n_heads"):
            groups = attention.count("kv_n_heads")
        elif attention is not None and attention.text("attn_type") == "multiquery_attention":
            groups = 1
        found = groups or fields.count(*_KV_KEYS) or fields.count("num_query_groups")
        shared = fields.count("n_shared_head")  # PLaMo: query heads to a KV head
        if found is None and shared is not None and heads is not None:
            if heads % shared:
                raise fields.error("n_shared_head", f"is {shared}, which does not divide the {heads} heads")
            found = heads // shared
        if found is None:
            found = self._attention_heads()
            fields.note(f"No number of KV heads in the file: as many as attention heads, {found}.")
        if heads is not None:
            self._check_groups(found, heads)
        return found

    def _check_groups(self, kv_heads: int, heads: int, key: str = "num_key_value_heads") -> None:
        if kv_heads > heads or heads % kv_heads:
            raise self._fields.error(
                key,
                f"is {kv_heads}, which does not divide the {heads} attention heads",
                fix="Correct one of the two.",
            )

    def _kv_list(self) -> list[int] | None:
        """KV heads of each layer, where a family gives a list (OpenELM, Nemotron-NAS)."""
        fields = self._fields
        if fields.stated("block_configs"):
            return self._block_heads()
        key = next((name for name in _KV_LISTS if isinstance(fields.raw(name), (list, tuple))), None)
        if key is None:
            return None
        values = fields.items(key) or ()
        if len(values) != self._layers:
            raise fields.error(key, f"has {len(values)} entries for {self._layers} layers")
        found = [
            0 if value is None else fields.whole(key, value, minimum=0, maximum=MAX_DIM) for value in values
        ]
        heads = fields.count(*HEAD_KEYS)
        if heads is not None:
            for kv_heads in filter(None, found):
                self._check_groups(kv_heads, heads, key)
        return found

    def _block_heads(self) -> list[int] | None:
        fields = self._fields
        found = []
        for value in fields.items("block_configs") or ():
            attention: Any = value.get("attention") if isinstance(value, dict) else None
            group = attention.get("n_heads_in_group") if isinstance(attention, dict) else None
            if group is None:
                found.append(0)
                continue
            size = fields.whole("block_configs", group)
            heads = self._attention_heads()
            if heads % size:
                raise fields.error(
                    "block_configs", f"has {size} heads in a group, which does not divide {heads} heads"
                )
            found.append(heads // size)
        if not any(found):
            return None
        if len(found) < self._layers:
            raise fields.error("block_configs", f"has {len(found)} entries for {self._layers} layers")
        return found
