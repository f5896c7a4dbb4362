"""``kvarena plan`` counts layers and bytes as SGLang's own ``ModelConfig`` and pool configurators do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvarena.plugin.commands.plan.capacity import Split, capacity
from kvarena.plugin.commands.plan.load import load_config
from kvarena.plugin.commands.plan.ranks import CacheDtypes, RankGeometry, rank_geometry
from kvarena.plugin.commands.plan.read import read_model
from kvarena.plugin.commands.plan.sglang_layers import HYBRID_WINDOW
from kvarena.plugin.engines.sglang.families.shapes import resolve

pytestmark = pytest.mark.sglang

CONFIGS = Path(__file__).parents[1] / "plugin" / "commands" / "plan" / "data" / "configs"
_CONFIG = "sglang.srt.configs.model_config"
#: Architectures of drafts and of pools that are not planned: no file of a model to serve names them.
NOT_PLANNED = ("DeepseekV4", "MTP", "NextN")

WITH_HEADS = [
    *("gemma-2-9b", "gemma-3-1b", "gemma-3-27b", "gemma-3n-e4b", "gemma-4-e2b", "gpt-oss-20b"),
    *("llama-3.1-70b", "llama-4-scout", "mistral-7b-v0.1", "phi-3-mini-128k", "phi-4-mini", "qwen2.5-7b"),
    *("qwen3-32b", "granite-swash-2b-short"),
]
WITH_LATENTS = ["deepseek-v2-lite", "deepseek-v3", "minicpm3-4b"]
WITH_STATES = ["granite-4.0-h-tiny", "nemotron-3-nano-30b", "nemotron-h-56b", "qwen3-next-80b-a3b"]

#: What a file that leaves its architecture out is served as.
NAMED = {
    "gemma-3n-e4b": "Gemma3nForConditionalGeneration",
    "granite-4.0-h-tiny": "GraniteMoeHybridForCausalLM",
}


#: Known to transformers 5.19, which 0.5.22 and later come with.
NEWER = ("granite-swash-2b-short", "minicpm3-4b")


def skip_unknown(name: str, sglang: Any) -> None:
    if name in NEWER and sglang.number < 22:
        pytest.skip(f"the transformers of {sglang.version} does not know {name}")


def own_config(name: str, folder: Path) -> Any:
    """SGLang's ``ModelConfig`` of one of the published configurations."""
    file = load_config(CONFIGS / f"{name}.json")
    file.setdefault("architectures", [NAMED.get(name, "")])
    file.pop("quantization_config", None)  # of weights alone, and not all methods load on the CPU
    folder.joinpath("config.json").write_text(json.dumps(file))
    return resolve(_CONFIG).ModelConfig(str(folder), trust_remote_code=False, dtype="bfloat16")


def counted(name: str, release: str, tp: int = 1) -> tuple[Any, RankGeometry]:
    file = load_config(CONFIGS / f"{name}.json")
    file.setdefault("architectures", [NAMED.get(name, "")])
    read = read_model(file, sglang=release)
    return read, rank_geometry(read.geometry, tp=tp, dtypes=CacheDtypes())


def test_the_allow_list_is_the_wheel_s(sglang: Any) -> None:
    of_model = resolve(_CONFIG).is_hybrid_swa_model
    names = frozenset().union(*HYBRID_WINDOW.values())
    text = SimpleNamespace(layer_types=["sliding_attention"], sliding_window=8, is_hybrid_swa=False)
    assert {name for name in names if of_model([name], text)} == HYBRID_WINDOW[sglang.version]


def test_no_architecture_of_the_wheel_is_left_out(sglang: Any) -> None:
    """Every name in the function itself and the tuples that it unpacks is in the table, but for drafts."""
    module = resolve(_CONFIG)
    constants: set[str] = set()
    for constant in module.is_hybrid_swa_model.__code__.co_consts:
        constants.update(constant if isinstance(constant, frozenset | tuple) else (constant,))
    for global_name in module.is_hybrid_swa_model.__code__.co_names:
        constants.update(getattr(module, global_name, ()) if global_name.endswith("ARCHS") else ())
    found = {
        name
        for name in constants
        if isinstance(name, str) and name[:1].isupper() and not any(word in name for word in NOT_PLANNED)
    }
    assert found == HYBRID_WINDOW[sglang.version]


@pytest.mark.parametrize("name", WITH_HEADS)
def test_layers_and_bytes_of_heads_are_sglang_s(sglang: Any, name: str, tmp_path: Path) -> None:
    skip_unknown(name, sglang)
    own = own_config(name, tmp_path)
    read, rank = counted(name, sglang.version)
    assert read.sglang is not None
    assert read.sglang.hybrid_window is bool(own.is_hybrid_swa)
    window = rank.get("swa") or rank.get("chunked")
    full = rank.get("full")
    assert full is not None
    of_full = own.get_num_kv_heads(1) * (own.head_dim + own.v_head_dim) * 2
    if own.is_hybrid_swa:
        assert window is not None
        assert list(full.layers) == own.full_attention_layer_ids
        assert list(window.layers) == own.swa_attention_layer_ids
        of_window = own.get_swa_num_kv_heads(1) * (own.swa_head_dim + own.swa_v_head_dim) * 2
        assert set(window.layer_bytes) == {of_window}
    else:
        assert window is None
        assert len(full.layers) == own.num_attention_layers
    assert set(full.layer_bytes) == {of_full}


@pytest.mark.parametrize("name", WITH_LATENTS)
def test_layers_and_bytes_of_latents_are_sglang_s(sglang: Any, name: str, tmp_path: Path) -> None:
    skip_unknown(name, sglang)
    own = own_config(name, tmp_path)
    read, rank = counted(name, sglang.version)
    assert own.attention_arch == resolve(_CONFIG).AttentionArch.MLA
    assert read.geometry.mla
    full = rank.get("full")
    assert full is not None
    assert len(full.layers) == own.num_attention_layers
    assert full.entry_bytes == (own.kv_lora_rank + own.qk_rope_head_dim) * 2 * own.num_attention_layers


@pytest.mark.parametrize("name", WITH_STATES)
def test_layers_with_attention_and_with_states_are_sglang_s(sglang: Any, name: str, tmp_path: Path) -> None:
    own = own_config(name, tmp_path)
    _, rank = counted(name, sglang.version)
    mixed = resolve("sglang.srt.configs.hybrid_arch.mambaish_config")(own)
    full, states = rank.get("full"), rank.state_pool
    assert full is not None
    assert states is not None
    assert list(full.layers) == list(mixed.full_attention_layer_ids)
    own_states = getattr(mixed, "mamba_layer_ids", None) or mixed.linear_layer_ids
    assert list(states.layers) == list(own_states)
    of_full = own.get_num_kv_heads(1) * (own.head_dim + own.v_head_dim) * 2
    assert Counter(full.layer_bytes) == {of_full: len(full.layers)}


class _ServerArgs(SimpleNamespace):
    """Every switch that a release has beside the stated ones is off."""

    def __getattr__(self, name: str) -> bool:
        return False


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", "gemma-4-e2b", "gemma-3-27b", "mistral-7b-v0.1", "llama-3.1-70b"]
)
def test_tokens_of_a_budget_are_sglang_s(
    rig: Any, rig_module: Any, runner_module: Any, name: str, tmp_path: Path
) -> None:
    """SGLang's own pool configurator, given the same bytes; kvarena counts the sink and alignment, too."""
    own = own_config(name, tmp_path)
    page, budget = 16, 64 << 30
    runner_module._answer_for_the_device(rig.monkeypatch, budget)
    kvc = runner_module.configurator(rig, rig_module, page)
    layers = own.num_attention_layers
    kvc.model_config, kvc.is_hybrid_swa = own, own.is_hybrid_swa
    kvc.sliding_window_size = own.sliding_window_size
    kvc.server_args = _ServerArgs(**vars(kvc.server_args))
    kvc.layer_info = SimpleNamespace(
        full_attention_layer_ids=getattr(own, "full_attention_layer_ids", None),
        swa_attention_layer_ids=getattr(own, "swa_attention_layer_ids", None),
        start_layer=0,
        end_layer=layers,
        num_effective_layers=layers,
    )
    solver = resolve("sglang.srt.model_executor.pool_configurator").create_memory_pool_configurator(kvc)
    theirs = solver.calculate_pool_sizes(budget, page)
    _, rank = counted(name, rig.release.version)
    ours = capacity([rank], budget, page_size=page, split=Split())
    assert ours.tokens is not None
    # The sink is one page of the larger kind, and the other kind starts at the next multiple of its own.
    lost = -(-3 * rank.sink_bytes(page) // sum(pool.page_bytes(page) for pool in rank.sub_pools)) * page
    assert 0 <= theirs.max_total_num_tokens - ours.tokens <= lost
    if own.is_hybrid_swa:
        assert 0 <= theirs.swa_max_total_num_tokens - (ours.window_tokens or 0) <= lost
