"""From SGLang's arguments to the question that every kvarena planner answers."""

from __future__ import annotations

import os
from typing import Any

from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.pool import Refusal, SizingRequest

__all__ = ["ENVIRONMENT", "config_view", "model_config_of", "own_refusals", "request_from"]

ENVIRONMENT = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
_OVERRIDES = "sglang.srt.arg_groups.overrides"

SETTING_NAMES = {
    "enabled": ENVIRONMENT,
    "device": "--device",
    "driver": "--device",
    "role": "--disaggregation-mode",
    "unified": "--enable-unified-memory",
    "hybrid": "--model-path",
    "sub_pool_kinds": "--model-path",
    "decode_graphs": "--cuda-graph-backend-decode",
    "prefill_graphs": "--cuda-graph-backend-prefill",
    "chunked_prefill_size": "--chunked-prefill-size",
    "prefill_captured_sizes": "--cuda-graph-bs-prefill",
    "transfer_backend": "--disaggregation-transfer-backend",
    "transfer_protocol": "MOONCAKE_PROTOCOL",
    "memory_saver": "--enable-memory-saver",
    "custom_mem_pool": "SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
    "dcp_size": "--dcp-size",
    "context_parallel_size": "--attn-cp-size",
    "speculative_algorithm": "--speculative-algorithm",
    "ray": "--use-ray",
    "kv_cache_sharding": "--enable-kv-cache-sharding",
    "hisparse": "--enable-hisparse",
    "kv_cache_disabled": "--prefill-only-disable-kv-cache",
}


def config_view(server_args: Any) -> Any:
    """The arguments as resolved so far: a view since 0.5.18, the arguments themselves before."""
    try:
        resolving_view = resolve(f"{_OVERRIDES}.resolving_view")
    except LookupError:
        return server_args
    return resolving_view(server_args)


def model_config_of(server_args: Any) -> Any:
    """SGLang's ``ModelConfig`` for these arguments."""
    try:
        of = resolve(f"{_OVERRIDES}.model_config_of")
    except LookupError:
        return server_args.get_model_config()
    return of(server_args)


def request_from(server_args: Any, *, drafts_are_stocks_business: bool = False) -> SizingRequest:
    """Describe a server to the planners.

    Parameters
    ----------
    server_args : ServerArgs
        SGLang's.
    drafts_are_stocks_business : bool
        The release decides itself which speculative algorithms it can size (0.5.22 and later).
    """
    cfg = config_view(server_args)
    model = model_config_of(server_args)
    graphs = cfg.cuda_graph_config
    backend = cfg.disaggregation_transfer_backend if cfg.disaggregation_mode != "null" else None
    return SizingRequest(
        enabled=True,
        device=str(cfg.device),
        driver="cuda" if cfg.device == "cuda" and not _is_rocm() else None,
        role=cfg.disaggregation_mode,
        unified=bool(cfg.enable_unified_memory),
        hybrid=bool(model.is_hybrid_swa),
        sub_pool_kinds=_kinds(server_args, model),
        decode_graphs=not _disabled(graphs.decode),
        prefill_graphs=not _disabled(graphs.prefill),
        chunked_prefill_size=_largest_prefill(server_args, cfg),
        prefill_captured_sizes=tuple(graphs.prefill.bs or ()),
        transfer_backend=backend,
        transfer_protocol=_protocol() if backend == "mooncake" else None,
        memory_saver=bool(cfg.enable_memory_saver),
        custom_mem_pool=_env("SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
        dcp_size=int(cfg.dcp_size),
        context_parallel_size=int(cfg.attn_cp_size),
        speculative_algorithm=None if drafts_are_stocks_business else cfg.speculative_algorithm,
        ray=bool(cfg.use_ray),
        # Came with 0.5.22; every other field is in all releases, and one that is gone cannot be read.
        kv_cache_sharding=bool(getattr(cfg, "enable_kv_cache_sharding", False)),
        hisparse=bool(cfg.enable_hisparse),
        kv_cache_disabled=bool(cfg.prefill_only_disable_kv_cache),
        setting_names=SETTING_NAMES,
    )


def own_refusals(server_args: Any, *, own_virtual_ids: bool) -> tuple[Refusal, ...]:
    """What only SGLang knows, and the general request does not say."""
    found = []
    cfg = config_view(server_args)
    if os.environ.get(ENVIRONMENT, "").strip().lower() in ("0", "false", "no", "n"):
        found.append(
            Refusal(
                "contradiction",
                ENVIRONMENT,
                f"{ENVIRONMENT}=0 contradicts KVARENA_ENABLE=1; unset one of the two",
            )
        )
    if str(cfg.kv_cache_dtype).startswith("fp4"):
        found.append(
            Refusal("fp4", "--kv-cache-dtype", "FP4 KV has scale buffers beside the pool; use another dtype")
        )
    if cfg.elastic_ep_backend is not None:
        found.append(
            Refusal(
                "elastic_ep",
                "--elastic-ep-backend",
                "ranks that join or come back size their pools while the others serve, and could not agree "
                "with them; turn elastic expert parallelism off",
            )
        )
    # Came with 0.5.21.
    if cfg.disaggregation_mode == "decode" and getattr(cfg, "enable_pd_role_switch", False):
        found.append(
            Refusal(
                "role_switch",
                "--enable-pd-role-switch",
                "a decode server captures no prefill steps, so after a switch their activations would not be "
                "in what was measured; start it as a prefill server, or turn the switch off",
            )
        )
    model = model_config_of(server_args)
    if own_virtual_ids and model.is_hybrid_swa and _window_is_dearer(model):
        found.append(
            Refusal(
                "window_ids",
                "--model-path",
                "in this release the window side's table is too short for a model whose window layers take "
                "more bytes than its full ones (sglang#37560); use SGLang 0.5.20 or later",
            )
        )
    return tuple(found)


def _window_is_dearer(model: Any) -> bool:
    full = len(model.full_attention_layer_ids) * (model.head_dim + model.v_head_dim)
    window = len(model.swa_attention_layer_ids) * (model.swa_head_dim + model.swa_v_head_dim)
    return bool(window * model.get_swa_num_kv_heads(1) > full * model.get_num_kv_heads(1))


def _kinds(server_args: Any, model: Any) -> tuple[str, ...]:
    full = "mla" if _uses_mla(server_args) else "mha"
    kinds = [full, "mha"] if model.is_hybrid_swa else [full]
    if resolve("sglang.srt.configs.hybrid_arch.mambaish_config")(model) is not None:
        kinds.append("mamba")
    special = resolve("sglang.srt.configs.model_config")
    for test, kind in (("is_deepseek_v4", "deepseek-v4"), ("is_minimax_sparse", "minimax-sparse")):
        if getattr(special, test)(model.hf_config):
            kinds.append(kind)
    return tuple(kinds)


def _uses_mla(server_args: Any) -> bool:
    try:
        uses = resolve(f"{_OVERRIDES}.use_mla_backend")
    except LookupError:
        # A method until ModelRunner overwrites it with a bool.
        uses = server_args.use_mla_backend
        return bool(uses() if callable(uses) else uses)
    return bool(uses(server_args))


def _largest_prefill(server_args: Any, cfg: Any) -> int | None:
    if cfg.chunked_prefill_size is None or cfg.chunked_prefill_size <= 0:
        return None
    try:
        return int(resolve(f"{_OVERRIDES}.max_prefill_buffer_tokens")(server_args))
    except LookupError:
        return int(server_args.max_prefill_buffer_tokens())


def _disabled(phase: Any) -> bool:
    backend = phase.backend
    return str(getattr(backend, "value", backend)).lower() == "disabled"


def _is_rocm() -> bool:
    """Whether torch's "cuda" is AMD's: SGLang's planner sizes late by its name, its runner does not."""
    import torch

    return torch.version.hip is not None


def _env(name: str) -> str | None:
    from sglang.srt.environ import envs

    value = getattr(envs, name).get()
    return None if value is None else str(value)


def _protocol() -> str:
    return os.environ.get("MOONCAKE_PROTOCOL", "rdma").lower()
