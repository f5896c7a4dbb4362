"""What a wrapper's language model is by default: a nested object holds only what differs from its class.

transformers writes a whole model's file with every key, but has long written an object inside it as the
difference from its class's default: published LLaVA and Idefics files hold neither layers nor heads. Read
from transformers 5.12.1, as the fallback of `class_defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SIZE_KEYS", "class_sizes"]

SIZE_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_SIZES = {
    "aria_text": (32, 4096, 32, 4096, 32000),
    "cohere": (40, 8192, 64, 22528, 256000),
    "cohere2": (40, 8192, 64, 22528, 256000),
    "deepseek_v2": (32, 4096, 32, 11008, 102400),
    "deepseek_v3": (61, 7168, 128, 18432, 129280),
    "ernie4_5": (18, 1024, 16, 3072, 103424),
    "ernie4_5_vl_moe_text": (28, 2560, 20, 12288, 103424),
    "gemma": (28, 3072, 16, 24576, 256000),
    "gemma2": (26, 2304, 8, 9216, 256000),
    "gemma3_text": (26, 2304, 8, 9216, 262208),
    "gemma3n_text": (35, 2048, 8, 16384, 262400),
    "gemma4_text": (30, 2304, 8, 9216, 262144),
    "glm4v_moe_text": (46, 4096, 96, 10944, 151424),
    "glm4v_text": (40, 4096, 32, 13696, 151552),
    "glm_ocr_text": (16, 1024, 16, 4096, 59392),
    "granite": (32, 4096, 32, 11008, 32000),
    "granitemoehybrid": (32, 4096, 32, 11008, 32000),
    "lfm2": (32, 2560, 32, 12288, 65536),
    "llama": (32, 4096, 32, 11008, 32000),
    "llama4_text": (48, 5120, 40, 8192, 202048),
    "minimax_m3_vl_text": (60, 6144, 64, 3072, 200064),
    "ministral3": (34, 4096, 32, 14336, 131072),
    "mistral": (32, 4096, 32, 14336, 32000),
    "mistral4": (36, 4096, 32, 12288, 131072),
    "mixtral": (32, 4096, 32, 14336, 32000),
    "mllama_text_model": (40, 4096, 32, 14336, 128256),
    "paddleocr_vl_text": (18, 1024, 16, 3072, 103424),
    "persimmon": (36, 4096, 64, 16384, 262144),
    "phi": (24, 2048, 32, 8192, 51200),
    "phi3": (32, 3072, 32, 8192, 32064),
    "qwen2": (32, 4096, 32, 22016, 151936),
    "qwen2_5_omni_text": (28, 3584, 28, 18944, 152064),
    "qwen2_5_vl_text": (80, 8192, 64, 29568, 152064),
    "qwen2_moe": (24, 2048, 16, 5632, 151936),
    "qwen2_vl_text": (80, 8192, 64, 29568, 152064),
    "qwen3": (32, 4096, 32, 22016, 151936),
    "qwen3_5_text": (32, 4096, 16, 12288, 248320),
    "qwen3_moe": (24, 2048, 32, 6144, 151936),
    "qwen3_vl_moe_text": (24, 2048, 16, 5632, 151936),
    "qwen3_vl_text": (32, 4096, 32, 22016, 151936),
    "smollm3": (36, 2048, 16, 11008, 128256),
}


def class_sizes(model_type: str) -> Mapping[str, int]:
    """Sizes of a class's default model; empty for one that is not known here."""
    return dict(zip(SIZE_KEYS, _SIZES.get(model_type, ()), strict=False))
