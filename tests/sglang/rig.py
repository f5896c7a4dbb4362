"""Real pools, allocators and arguments of one SGLang release, on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvarena.hooks import hookimpl
from kvarena.plugin.engines.sglang import construct
from kvarena.plugin.engines.sglang.bound import SglangPool, bound_of
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.families.targets import Family, Support
from kvarena.plugin.engines.sglang.runtime import runtime

FULL_LAYERS, SWA_LAYERS, HEADS, HEAD_DIM = 2, 3, 2, 8
ITEM = 2  # bytes of a bfloat16
FULL_ENTRY = FULL_LAYERS * 2 * HEADS * HEAD_DIM * ITEM
SWA_ENTRY = SWA_LAYERS * 2 * HEADS * HEAD_DIM * ITEM
CONTEXT, WINDOW = 64, 8


class Release:
    """What one release offers, under names that do not depend on it."""

    def __init__(self, version: str) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        assert runtime.family is not None, "load_plugins did not attach kvarena"
        self.version = version
        self.number = int(version.rpartition(".")[2])
        assert runtime.choice is not None
        self.choice = runtime.choice
        self.family: Family = runtime.family
        self.layer: Support = runtime.support or Support.PLANNER_ONLY
        self.pools = resolve("sglang.srt.mem_cache.unified_memory_pool")
        self.registry = resolve("sglang.srt.plugins.hook_registry.HookRegistry")
        self.planner_path = self.family.planner.path
        self.hardened = self.layer is Support.NATIVE

    def publish(self, **arguments: Any) -> None:
        """SGLang's process-wide configuration, as a server of these arguments would have it."""
        from sglang.srt.runtime_context import publish, reset_context
        from sglang.srt.server_args import ServerArgs

        reset_context()
        publish(ServerArgs(model_path="dummy", **arguments), role="tokenizer")


class Bundle:
    """One pool with everything above it."""

    def __init__(self, parts: Any) -> None:
        self.pool = parts.unified_memory_pool
        self.kv = parts.token_to_kv_pool
        self.allocator = parts.token_to_kv_pool_allocator

    @property
    def bound(self) -> SglangPool:
        bound = bound_of(self.pool)
        assert bound is not None
        return bound

    @property
    def sides(self) -> tuple[Any, Any]:
        return self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator

    def resize(self, config: Any) -> None:
        """As ModelRunner does: first the backing, then the allocators."""
        self.kv.finalize_backing(config)
        self.allocator.resize(config)


class Rig:
    """Makes bundles; one for each test."""

    def __init__(self, release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = release
        self.monkeypatch = monkeypatch
        self._undo: list[Callable[[], object]] = []
        release.publish()
        runtime.planned = True

    def close(self) -> None:
        for bound in list(runtime.pools):
            bound.close()
        assert not runtime.pools
        for step in self._undo:
            step()

    def use_driver(self, driver: Any) -> None:
        """Arenas of this test stand on this driver."""

        class Answer:
            @hookimpl(tryfirst=True)
            def kvarena_driver(self, device: torch.device) -> Any:
                return driver

        plugin = Answer()
        runtime.manager.register(plugin)
        self._undo.append(lambda: runtime.manager.unregister(plugin))

    def plug(self, plugin: object) -> None:
        """Register a third party's plugin for this test."""
        runtime.manager.register(plugin)
        self._undo.append(lambda: runtime.manager.unregister(plugin))

    def total_bytes(self, full: int, swa: int) -> int:
        return full * FULL_ENTRY + swa * SWA_ENTRY

    def config(self, full: int, swa: int, nbytes: int | None = None) -> Any:
        """SGLang's own MemoryPoolConfig for so many tokens on each side."""
        config = resolve("sglang.srt.model_executor.pool_configurator.MemoryPoolConfig")(
            max_total_num_tokens=full, full_max_total_num_tokens=full, swa_max_total_num_tokens=swa
        )
        config.unified_memory_pool_bytes = self.total_bytes(full, swa) if nbytes is None else nbytes
        return config

    def eager(self, full: int, swa: int, **changes: Any) -> Bundle:
        """Stock's own pool of that size."""
        return Bundle(self._init(self._arguments(full, swa, **changes), planned=False))

    def reserved(self, full: int, swa: int, **changes: Any) -> Bundle:
        """The same over an arena, with only the sink backed."""
        arguments = self._arguments(full, swa, **changes)
        if "model_context_len" in self._parameters:
            arguments |= {"model_context_len": CONTEXT, "sliding_window_size": WINDOW}
        return Bundle(self._init(arguments, planned=True))

    @property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.release.pools.init_unified_swa_pools).parameters)

    def _arguments(
        self, full: int, swa: int, page_size: int = 4, lazy: bool = False, nbytes: int | None = None
    ) -> dict[str, Any]:
        arguments = {
            "device": "cpu",
            "kv_cache_dtype": torch.bfloat16,
            "head_num": HEADS,
            "head_dim": HEAD_DIM,
            "v_head_dim": HEAD_DIM,
            "swa_head_num": HEADS,
            "swa_head_dim": HEAD_DIM,
            "swa_v_head_dim": HEAD_DIM,
            "page_size": page_size,
            "start_layer": 0,
            "end_layer": FULL_LAYERS + SWA_LAYERS,
            "swa_attention_layer_ids": list(range(SWA_LAYERS)),
            "full_attention_layer_ids": list(range(SWA_LAYERS, SWA_LAYERS + FULL_LAYERS)),
            "enable_memory_saver": False,
            "need_sort": False,
            "lazy_compaction": lazy,
        }
        if "total_bytes" in self._parameters:
            arguments["total_bytes"] = self.total_bytes(full, swa) if nbytes is None else nbytes
        else:
            arguments |= {"full_max_total_num_tokens": full, "swa_max_total_num_tokens": swa}
            if nbytes is not None:
                arguments["unified_total_bytes"] = nbytes
        return arguments

    def _init(self, arguments: dict[str, Any], *, planned: bool) -> Any:
        init = self.release.pools.init_unified_swa_pools
        if self.release.hardened:
            runtime.planned = planned
            return init(**arguments, post_capture_active=planned)
        stub = SimpleNamespace(
            post_capture_kv_active=planned,
            model_config=SimpleNamespace(context_len=CONTEXT, sliding_window_size=WINDOW),
        )
        return construct.in_configurator(lambda _, **given: init(**given), stub, **arguments)


def scalars(bundle: Bundle) -> dict[str, Any]:
    """Every number, and every table of numbers, in the pool and above it: what a size can show in."""
    parts = {
        "pool": bundle.pool,
        "kv": bundle.kv,
        "kv.full": bundle.kv.full_kv_pool,
        "kv.swa": bundle.kv.swa_kv_pool,
        "allocator": bundle.allocator,
        "allocator.full": bundle.sides[0],
        "allocator.swa": bundle.sides[1],
    }
    found: dict[str, Any] = {}
    for where, part in parts.items():
        for name, value in vars(part).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            table = (
                isinstance(value, dict) and bool(value) and all(isinstance(v, int) for v in value.values())
            )
            if number or table:
                found[f"{where}.{name}"] = dict(value) if table else value
    found["available_size"] = bundle.allocator.available_size()
    found["size"] = bundle.allocator.size
    for side in bundle.sides:
        found[f"{side.sub_pool_name}.available_size"] = side.available_size()
        found[f"{side.sub_pool_name}.free_ids"] = (
            None if side.free_virtual_ids is None else side.free_virtual_ids.tolist()
        )
    # Memos and their epochs count how often something changed; statistics carry a time.
    return {
        name: value
        for name, value in found.items()
        if not any(word in name for word in ("epoch", "_stats_", "_memo_"))
    }


def hf_config(architecture: str) -> Any:
    """A model's configuration that says no more than its architecture."""
    from transformers import PretrainedConfig

    return PretrainedConfig(architectures=[architecture])


def planner_arguments(release: Release, **changes: Any) -> Any:
    """Arguments of a server that every planner accepts, but for `changes`.

    Names with two underscores reach into the model: ``model__is_hybrid_swa=False``.
    """
    model = {
        "is_hybrid_swa": True,
        "attention_arch": resolve("sglang.srt.configs.model_config.AttentionArch").MHA,
        "hf_config": hf_config("GptOssForCausalLM"),
        "is_draft_model": False,
        "linear_attn_registry_result": None,
        "full_attention_layer_ids": [0, 2],
        "swa_attention_layer_ids": [1, 3],
        "head_dim": 8,
        "v_head_dim": 8,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
        "get_num_kv_heads": lambda tp: 2,
        "get_swa_num_kv_heads": lambda tp: 2,
    }
    fields = {
        "device": "cuda",
        "dcp_size": 1,
        "attn_cp_size": 1,
        "pp_size": 1,
        "kv_cache_dtype": "auto",
        "prefill_only_disable_kv_cache": False,
        "enable_memory_saver": False,
        "enable_unified_memory": True,
        "enable_kv_cache_sharding": False,
        "enable_hisparse": False,
        "enable_pd_role_switch": False,
        "elastic_ep_backend": None,
        "enable_dynamic_chunking": False,
        "disaggregation_mode": "null",
        "disaggregation_transfer_backend": "mooncake",
        "speculative_algorithm": None,
        "use_ray": False,
        "chunked_prefill_size": 2048,
        "max_prefill_tokens": 16384,
        "cuda_graph_config": SimpleNamespace(
            decode=SimpleNamespace(backend="full", bs=[1, 2], max_bs=2),
            prefill=SimpleNamespace(backend="full", bs=[16, 2048], max_bs=2048),
        ),
        "model_path": "dummy",
    }
    for name, value in changes.items():
        where, _, rest = name.partition("__")
        if (where, rest) == ("model", "architecture"):
            model["hf_config"] = hf_config(value)
        elif where == "model":
            model[rest] = value
        elif where == "graph":
            phase, _, attribute = rest.partition("__")
            setattr(getattr(fields["cuda_graph_config"], phase), attribute, value)
        else:
            fields[name] = value
    config = SimpleNamespace(**model)
    arguments = SimpleNamespace(**fields, _model_config=config, _resolved_overrides=())
    if release.number <= 18:
        cls = resolve("sglang.srt.server_args.ServerArgs")
        arguments.get_model_config = lambda: config
        for method in ("use_mla_backend", "max_prefill_buffer_tokens"):
            setattr(arguments, method, getattr(cls, method).__get__(arguments))
    return arguments


def plan(release: Release, arguments: Any) -> bool:
    """Ask SGLang's planner, as SGLang does."""
    return bool(resolve(release.planner_path)(arguments))
