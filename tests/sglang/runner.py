"""A model runner as far as the resize after capture goes, around SGLang's own functions.

The device's answers (free memory, synchronize) are given by the test; everything else is SGLang's code.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvarena.plugin.engines.sglang.families.shapes import resolve

_RUNTIME = "sglang.srt.model_executor.model_runner_components.kv_pool_runtime"


def configurator(rig: Any, module: Any, page_size: int) -> Any:
    """SGLang's KVCacheConfigurator for the rig's two-kinds-of-layers model."""
    full = list(range(module.SWA_LAYERS, module.SWA_LAYERS + module.FULL_LAYERS))
    swa = list(range(module.SWA_LAYERS))
    made = object.__new__(resolve("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"))
    spec = resolve("sglang.srt.speculative.spec_info.SpeculativeAlgorithm").from_string(None)
    model = SimpleNamespace(
        full_attention_layer_ids=full,
        swa_attention_layer_ids=swa,
        attention_arch=resolve("sglang.srt.configs.model_config.AttentionArch").MHA,
        get_num_kv_heads=lambda *ranks: module.HEADS,
        get_swa_num_kv_heads=lambda *ranks: module.HEADS,
        head_dim=module.HEAD_DIM,
        v_head_dim=module.HEAD_DIM,
        swa_head_dim=module.HEAD_DIM,
        swa_v_head_dim=module.HEAD_DIM,
        context_len=module.CONTEXT,
        sliding_window_size=module.WINDOW,
        hf_config=module.hf_config("GptOssForCausalLM"),
        is_multimodal=False,
        is_hybrid_swa=True,
        is_draft_model=False,
        linear_attn_registry_result=None,
    )
    fields = {
        "device": "cpu",
        "gpu_id": 0,
        "model_config": model,
        "kv_cache_dtype": torch.bfloat16,
        "kv_cache_dtype_str": "auto",
        "page_size": page_size,
        "sliding_window_size": module.WINDOW,
        "spec_algorithm": spec,
        "spec_aux_config": SimpleNamespace(draft_model_config=None, dflash_draft_num_layers=None),
        "is_draft_worker": False,
        "is_hybrid_swa": True,
        "is_hybrid_swa_compress": False,
        "use_mla_backend": False,
        "post_capture_kv_active": True,
        "mambaish_config": None,
        "pp_size": 1,
        "attn_dp_size": 1,
        "ps": SimpleNamespace(pp_size=1, attn_dp_size=1, tp_size=1),
        "server_args": SimpleNamespace(swa_full_tokens_ratio=0.8, max_running_requests=None, pp_size=1),
        "layer_info": SimpleNamespace(
            full_attention_layer_ids=full,
            swa_attention_layer_ids=swa,
            start_layer=0,
            end_layer=len(full) + len(swa),
        ),
        "kv_shard_size": 1,
        "draft_parallel_layout": None,
        "dflash_draft_cell_size_per_token": None,
    }
    slots = {name for cls in type(made).__mro__ for name in getattr(cls, "__slots__", ())}
    for name, value in fields.items():
        if name in slots or not slots:
            setattr(made, name, value)
    return made


def runner(rig: Any, module: Any, bundle: Any, *, page_size: int, free_bytes: int) -> Any:
    """What ``ModelRunner.post_capture_resize_kv_pool`` and what it calls read of a model runner."""
    made = configurator(rig, module, page_size)
    maximum = bundle.allocator._size_full if not rig.release.family.shared_budget else 10**9
    requests = SimpleNamespace(reset_aux_cache_allocator=lambda: None)
    _answer_for_the_device(rig.monkeypatch, free_bytes)
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        model_config=made.model_config,
        token_to_kv_pool=bundle.kv,
        token_to_kv_pool_allocator=bundle.allocator,
        req_to_token_pool=requests,
        kv_cache_configurator=made,
        pre_model_load_memory=1.0,
        mem_fraction_static=1.0,
        max_running_requests=None,
        max_total_num_tokens=maximum,
        full_max_total_num_tokens=maximum,
        swa_max_total_num_tokens=maximum,
        is_hybrid_swa=True,
        memory_pool_config=rig.config(256, 128),
        canary_manager=None,
        sampling_prewarm_result=SimpleNamespace(sampling_headroom_bytes=0),
        server_args=made_server_args(),
    )


def made_server_args() -> Any:
    """Read up to 0.5.18 in place of the process-wide configuration."""
    return SimpleNamespace(
        cuda_graph_config=graphs(), disaggregation_mode="null", mm_feature_transport="default"
    )


def graphs() -> Any:
    return SimpleNamespace(
        decode=SimpleNamespace(max_bs=2, backend="full", bs=[1, 2]),
        prefill=SimpleNamespace(max_bs=2048, backend="full", bs=[2048], full_prefill_max_req=None),
    )


def resize(runner: Any) -> None:
    """SGLang's own method, hooked."""
    resolve("sglang.srt.model_executor.model_runner.ModelRunner.post_capture_resize_kv_pool")(runner)


def _answer_for_the_device(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    module = resolve(_RUNTIME)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(module, "get_available_gpu_memory", lambda *_, **__: free_bytes / (1 << 30))
    if hasattr(module, "get_world_group"):
        monkeypatch.setattr(module, "get_world_group", lambda: SimpleNamespace(world_size=1, cpu_group=None))
    if hasattr(module, "get_parallel"):
        world = SimpleNamespace(launch_world_size=1, world_group=SimpleNamespace(cpu_group=None))
        monkeypatch.setattr(module, "get_parallel", lambda: world)
    solver = resolve("sglang.srt.model_executor.pool_configurator")
    monkeypatch.setattr(solver, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1, attn_dcp_size=1))
    if hasattr(module, "get_exec"):
        exec_ = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs()))
        monkeypatch.setattr(module, "get_exec", lambda: exec_)
    if hasattr(module, "graph_pool_borrow_enabled"):
        monkeypatch.setattr(module, "graph_pool_borrow_enabled", lambda: True)
