"""SGLang's own resolution of real arguments: the reserve is given away only where the pool is sized later."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kvarena.hooks import hookimpl
from kvarena.plugin.engines.sglang import resolution
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.request import ENVIRONMENT, config_view
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.pool import Refusal

# What SGLang and transformers warn about is not ours to judge.
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

MODEL = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "torch_dtype": "bfloat16",
}
GRAPHS = {"decode": {"backend": "full", "bs": [1, 2]}, "prefill": {"backend": "full", "bs": [16, 2048]}}
#: Where the releases look up how much memory the device has.
ASKING = ("server_args", "arg_groups.pipeline", "arg_groups.memory_hook")

Resolve = Callable[..., tuple[float, bool]]


@pytest.fixture
def resolved(rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolve]:
    """Resolve arguments, and give back the memory fraction and the planner's answer afterwards."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for name in ASKING:
        try:
            module = resolve(f"sglang.srt.{name}")
        except LookupError:
            continue  # not in this release
        monkeypatch.setattr(module, "get_device_memory_capacity", lambda *_, **__: 143_000, raising=False)
    context = resolve("sglang.srt.runtime_context")

    def run(**changes: Any) -> tuple[float, bool]:
        given = {
            "model_path": str(tmp_path),
            "enable_unified_memory": True,
            "device": "cuda",
            "skip_tokenizer_init": True,
            "cuda_graph_config": GRAPHS,
            "chunked_prefill_size": 2048,
            "attention_backend": "triton",
            "page_size": 1,
        }
        arguments = resolve("sglang.srt.server_args.ServerArgs")(**given | changes)
        context.reset_context()
        context.publish(arguments, role="tokenizer")
        answer = bool(resolve(rig.release.planner_path)(arguments))
        return float(config_view(arguments).mem_fraction_static), answer

    with mock.patch.dict(os.environ):  # resolution leaves variables behind
        os.environ.pop(ENVIRONMENT, None)
        yield run
        context.reset_context()


@pytest.fixture
def capturable(rig: Any) -> str:
    """An attention backend with which the release captures prefill steps."""
    return "triton" if rig.release.number < 20 else "fa3"


@pytest.fixture
def reserve(resolved: Resolve) -> float:
    """The fraction that leaves SGLang's reserve."""
    fraction, planned = resolved(enable_memory_saver=True)
    assert not planned
    return fraction


def test_a_pool_that_is_sized_later_keeps_the_fraction_or_needs_none(
    rig: Any, resolved: Resolve, reserve: float, capturable: str
) -> None:
    if rig.release.number == 19:
        pytest.skip("this release captures no prefill steps with unified memory")
    fraction, planned = resolved(attention_backend=capturable)
    assert planned
    if rig.release.number >= 20:
        # Nothing is promised that might have to be taken back: more addresses are reserved instead.
        assert fraction == reserve
    else:
        assert fraction > reserve


def test_what_sglang_changes_after_it_asked_its_planner_costs_no_reserve(
    rig: Any, resolved: Resolve, reserve: float
) -> None:
    """Full prefill graphs are disabled for Triton when the memory fraction is decided already."""
    if rig.release.number < 20:
        pytest.skip("this release disables them before, or not at all")
    assert resolved(attention_backend="triton") == (reserve, False)


class Late:
    """A reason that shows when the arguments are resolved."""

    asked = 0

    @hookimpl
    def kvarena_refusals(self, request: Any) -> list[Refusal]:
        self.asked += 1
        return [Refusal("late", "--late", "not any more")] if self.asked > 1 else []


def test_any_reason_that_shows_late_costs_no_reserve(
    rig: Any, resolved: Resolve, reserve: float, capturable: str
) -> None:
    late = Late()
    rig.plug(late)
    assert resolved(attention_backend=capturable) == (reserve, False)
    assert late.asked >= 1
    assert runtime.planned is False


def test_arguments_that_cannot_be_kept_are_resolved_with_the_reserve(
    resolved: Resolve, reserve: float, capturable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise TypeError("cannot pickle")

    monkeypatch.setattr(resolution, "deepcopy", refuse)
    assert resolved(attention_backend=capturable)[0] == reserve


def test_other_pools_are_resolved_as_stock_does(resolved: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "deepcopy", None)
    runtime.planned = None
    resolved(enable_unified_memory=False)
    assert runtime.planned is None
