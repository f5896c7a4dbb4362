"""Measured reserves through each release's own functions: budgets, limits and dummy steps."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.sglang.families.shapes import resolve
from kvarena.plugin.engines.sglang.measure import resizing
from kvarena.plugin.engines.sglang.measure import run as run_module
from kvarena.plugin.engines.sglang.measure.server import MeasuredServer
from kvarena.plugin.engines.sglang.measure.steps import StepShape
from kvarena.plugin.engines.sglang.measure.unmodified import keeps_fraction
from kvarena.plugin.engines.sglang.runtime import runtime
from kvarena.plugin.engines.sglang.session import ResizeSession

pytestmark = pytest.mark.sglang

GIB = 1 << 30
#: An H200 after the weights: what is free, what SGLang's fraction leaves, and what graphs took.
BEFORE_LOAD, FREE, SLACK, GRAPHS = 139.8, 139.0, 10.3, 2.0
FRACTION = 1 - SLACK / BEFORE_LOAD
UNMODIFIED = int((FREE - SLACK) * GIB)
AFTER_CAPTURE = FREE - GRAPHS
FLOOR = 1536 * (1 << 20) + (GIB >> 3)
RUNTIME = "sglang.srt.model_executor.model_runner_components.kv_pool_runtime"


class FakeMeter:
    def __init__(self) -> None:
        self.nbytes = 0

    def begin(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return self.nbytes

    def unseen_bytes(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def _settings(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not keeps_fraction(rig.release.family):
        pytest.skip("in this release the fraction is raised, and SGLang's own reserve stays")
    monkeypatch.setattr(runtime, "settings", Settings(enable=True))
    monkeypatch.setattr(runtime, "unmodified_bytes", None)


@pytest.fixture
def card(rig: Any, rig_module: Any, runner_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner whose device answers with the card's figures; steps cost what the test says."""
    rig.release.publish(
        page_size=4, enable_unified_memory=True, swa_full_tokens_ratio=0.8, chunked_prefill_size=8192
    )

    def build(
        limit: int, per_request: int, fixed: int = GIB, *, given: bool = False, fail_at: int = -1
    ) -> Any:
        bundle = rig.reserved(256, 128)
        runner = runner_module.runner(
            rig, rig_module, bundle, page_size=4, free_bytes=int(AFTER_CAPTURE * GIB)
        )
        module = resolve(RUNTIME)
        monkeypatch.setattr(
            module, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs()))
        )
        monkeypatch.setattr(module, "get_device_memory_capacity", lambda *_: 143_771)
        runner.pre_model_load_memory, runner.mem_fraction_static = BEFORE_LOAD, 0.989
        runner.max_running_requests = limit
        runner.max_total_num_tokens = 10**6
        runner.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        runner.model_config.vocab_size = 201_088
        runner.model_config.context_len = 131_072
        runner.server_args = SimpleNamespace(
            mem_fraction_static=None,
            max_running_requests=limit if given else None,
            disaggregation_mode="null",
            chunked_prefill_size=8192,
            max_prefill_tokens=16384,
            tp_size=1,
            pp_size=1,
            cuda_graph_config=graphs(),
            _resolved_overrides=(),
        )
        meter, ran = FakeMeter(), []

        def step(_: Any, shape: StepShape, begin: Any) -> None:
            begin()
            if len(ran) == fail_at:
                raise RuntimeError("CUDA out of memory")
            ran.append(shape)
            meter.nbytes = shape.requests * per_request or GIB

        monkeypatch.setattr(run_module, "run_step", step)
        made = functools.partial(MeasuredServer, meter=meter)

        def server(**given: Any) -> Any:
            # The figures of a card; the pool below is a small one on the host.
            free = int(AFTER_CAPTURE * GIB) - given["backed_bytes"]
            return made(**given | {"free_bytes": free, "unmodified_bytes": UNMODIFIED})

        monkeypatch.setattr(resizing, "MeasuredServer", server)
        monkeypatch.setattr(runtime, "unmodified_bytes", UNMODIFIED)
        budgets: list[int] = []
        limits: list[int] = []  # before SGLang caps them by what the small pool of this test holds
        solve = ResizeSession.solve

        def solved(self: Any, solver: Any, from_tokens: Any, budget: int) -> Any:
            budgets.append(budget)
            limits.append(self._runner.max_running_requests)
            return solve(self, solver, from_tokens, budget)

        monkeypatch.setattr(ResizeSession, "solve", solved)
        return SimpleNamespace(runner=runner, budgets=budgets, limits=limits, ran=ran, resize=resize)

    def resize(runner: Any) -> None:
        # SGLang asks the device what is free once more for its log.
        runner_module.resize(runner)

    return build


def kept_by(card: Any) -> float:
    """GiB that stay free beside the pool."""
    (budget,) = card.budgets
    return float(AFTER_CAPTURE - budget / GIB)


@pytest.mark.parametrize("limit", [32, 256, 2048, 4096])
def test_what_is_kept_is_what_was_measured(card: Any, limit: int) -> None:
    made = card(limit, per_request=1_000_000)
    made.resize(made.runner)
    largest = max(GIB, limit * 1_000_000)
    assert kept_by(made) == pytest.approx(max(FLOOR, largest * 1.5) / GIB, abs=1e-3)
    assert made.budgets[0] >= UNMODIFIED
    assert made.limits == [limit]


@pytest.mark.parametrize("limit", [2048, 4096])
def test_stock_keeps_its_fixed_reserve_for_the_same_figures(
    card: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the measured figures stand beside: the release's own function, with nothing measured."""
    made = card(limit, per_request=1_000_000)
    monkeypatch.setattr(runtime, "unmodified_bytes", None)
    made.resize(made.runner)
    assert made.ran == []
    assert kept_by(made) == pytest.approx(12.625, abs=0.01)


@pytest.mark.parametrize("limit", [2048, 4096])
def test_the_limit_yields_and_not_the_tokens(card: Any, limit: int) -> None:
    made = card(limit, per_request=9_000_000)
    made.resize(made.runner)
    room = AFTER_CAPTURE - UNMODIFIED / GIB
    assert made.budgets[0] >= UNMODIFIED
    assert made.limits == [int(room * GIB / 1.5 / 9_000_000)]


def test_an_explicit_limit_is_kept(card: Any) -> None:
    made = card(4096, per_request=2_000_000, given=True)
    made.resize(made.runner)
    assert made.limits == [4096]
    assert kept_by(made) == pytest.approx(4096 * 2_000_000 * 1.5 / GIB, abs=1e-3)


@pytest.mark.parametrize("index", range(16))
def test_a_step_that_fails_gives_exactly_the_unmodified_size(card: Any, index: int, caplog: Any) -> None:
    made = card(4096, per_request=1_000_000, fail_at=index)
    made.resize(made.runner)
    assert made.budgets == [UNMODIFIED]
    assert made.limits == [4096]
    assert "the size of unmodified SGLang" in caplog.text
    assert "CUDA out of memory" in caplog.text


def test_a_failed_resize_puts_the_limit_back(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = card(4096, per_request=9_000_000)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("nothing fits")

    monkeypatch.setattr(ResizeSession, "solve", refuse)
    with pytest.raises(RuntimeError, match="nothing fits"):
        made.resize(made.runner)
    assert made.runner.max_running_requests == 4096


def graphs() -> Any:
    return SimpleNamespace(
        decode=SimpleNamespace(max_bs=256, backend="full", bs=[256]),
        prefill=SimpleNamespace(max_bs=8192, backend="full", bs=[8192], full_prefill_max_req=None),
    )


def configurator(rig: Any, rig_module: Any, runner_module: Any, fraction: float | None) -> Any:
    made = runner_module.configurator(rig, rig_module, 4)
    made.server_args = SimpleNamespace(mem_fraction_static=fraction, tp_size=1, pp_size=1)
    return made


@pytest.mark.parametrize("given", [None, FRACTION])
def test_the_unmodified_size_is_known_before_capture(
    rig: Any, rig_module: Any, runner_module: ModuleType, monkeypatch: pytest.MonkeyPatch, given: float | None
) -> None:
    module = resolve("sglang.srt.mem_cache.kv_cache_configurator")
    rig.release.publish(page_size=4, enable_unified_memory=True, mem_fraction_static=FRACTION)
    monkeypatch.setattr(module, "get_available_gpu_memory", lambda *_, **__: FREE)
    if hasattr(module, "get_exec"):
        monkeypatch.setattr(
            module, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs()))
        )
    world = SimpleNamespace(launch_world_size=1, world_group=SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(module, "get_parallel", lambda: world, raising=False)
    if hasattr(module, "get_world_group"):
        monkeypatch.setattr(module, "get_world_group", lambda: SimpleNamespace(world_size=1, cpu_group=None))
    monkeypatch.setattr(runtime, "planned", True)
    made = configurator(rig, rig_module, runner_module, given)
    profile = module.KVCacheConfigurator._profile_available_bytes
    stock = inspect.unwrap(profile)(made, BEFORE_LOAD)
    reserved = profile(made, BEFORE_LOAD)
    assert runtime.unmodified_bytes == stock
    assert stock == pytest.approx(UNMODIFIED, rel=1e-3)
    if given is None:
        # As if only the smallest reserve were kept.
        assert (FREE * GIB) - reserved == pytest.approx(FLOOR, rel=1e-3)
    else:
        assert reserved == stock


def test_a_draft_tells_no_size(
    rig: Any, rig_module: Any, runner_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvarena.plugin.engines.sglang.measure.unmodified import profile_available_bytes

    made = configurator(rig, rig_module, runner_module, None)
    monkeypatch.setattr(made, "is_draft_worker", True)
    assert profile_available_bytes(lambda *_: 7, made, BEFORE_LOAD) == 7
    assert runtime.unmodified_bytes is None


class StubModel(torch.nn.Module):
    """Writes down the batches that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, input_ids: Any, positions: Any, batch: Any, **_: Any) -> None:
        from sglang.srt.layers import dp_attention

        told = getattr(dp_attention, "is_extend_in_batch", None) or dp_attention.get_is_extend_in_batch
        self.seen.append(
            SimpleNamespace(
                mode=batch.forward_mode,
                lengths=batch.seq_lens.tolist(),
                total=batch.seq_lens_sum,
                prefix=batch.extend_prefix_lens_cpu,
                positions=positions.tolist(),
                writes=set(batch.out_cache_loc.tolist()),
                extend=told(),
                random=torch.rand(1).item(),
            )
        )


@pytest.fixture
def eager(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's own eager runner over a stub of a model, as far as its dummy steps go."""
    base = resolve("sglang.srt.model_executor.runner.base_runner")
    rig.release.publish(page_size=4, enable_unified_memory=True)
    barrier = SimpleNamespace(barrier=lambda: None)
    parallel = SimpleNamespace(
        pp_size=1, pp_rank=0, attn_cp_size=1, tp_group=barrier, num_dp_ranks=1, dcp_enabled=False,
        dp_size=1, attn_dp_size=1, tp_size=1,
    )  # fmt: skip
    for name, value in {
        "get_parallel": lambda: parallel,
        "require_mlp_tp_gather": lambda *_: False,
        "require_attn_tp_gather": lambda *_: False,
        "require_gathered_buffer": lambda *_: False,
        "get_server_return_hidden_states_mode": lambda: (
            resolve("sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode").NULL
        ),
        "create_dummy_verify_input": lambda *_: None,
        "set_dp_buffer_len": lambda *_: None,
        "get_tp_group": lambda: barrier,
    }.items():
        if hasattr(base, name):
            monkeypatch.setattr(base, name, value)
    spec = resolve("sglang.srt.speculative.spec_info.SpeculativeAlgorithm").from_string(None)
    runner = SimpleNamespace(
        device="cpu",
        gpu_id=0,
        model=StubModel(),
        is_generation=True,
        is_draft_worker=False,
        spec_algorithm=spec,
        lora_manager=None,
        dtype=torch.bfloat16,
        dp_size=1,
        attn_dp_size=1,
        ps=parallel,
        tp_group=barrier,
        server_args=SimpleNamespace(enable_torch_compile=False, speculative_num_draft_tokens=None),
        model_config=SimpleNamespace(
            hidden_size=8, vocab_size=64, dtype=torch.bfloat16, is_encoder_decoder=False,
            hf_config=SimpleNamespace(), context_len=1024,
        ),
        attn_backend=SimpleNamespace(
            get_cuda_graph_seq_len_fill_value=lambda: 1, init_forward_metadata=lambda batch: None
        ),
        ngram_embedding_manager=SimpleNamespace(enabled=False, table=None),
        get_pp_proxy_topk_size=lambda: None,
        get_pp_proxy_residual_num_blocks=lambda: None,
        kv_index_translator=SimpleNamespace(bind_runner_slots=lambda batch: None),
        prepare_dummy_forward_batch=lambda batch: batch,
        decode_num_tokens_per_req=lambda **_: 1,
    )  # fmt: skip
    made = object.__new__(resolve("sglang.srt.model_executor.runner.eager_runner.EagerRunner"))
    made.model_runner = runner
    runner.eager_runner = made
    return runner


def test_sglangs_dummy_runs_the_steps_as_they_are_described(eager: Any) -> None:
    began: list[int] = []
    for shape in (
        StepShape("prefill", "extend", 1, 16),
        StepShape("prefill behind a prefix", "extend", 2, 4, 100),
        StepShape("decode", "decode", 3, 1, 10, longest=50),
    ):
        run_module.run_step(eager, shape, lambda: began.append(1))
    prefill, behind, decode = eager.model.seen
    assert len(began) == 3
    assert (prefill.lengths, prefill.prefix, prefill.extend) == ([16], [0], True)
    assert (behind.lengths, behind.prefix, behind.total) == ([104, 104], [100, 100], 208)
    assert behind.positions == [100, 101, 102, 103] * 2
    assert (decode.lengths, decode.total, decode.extend) == ([50, 11, 11], 72, False)
    assert decode.positions == [49, 10, 10]
    assert prefill.writes == behind.writes == decode.writes == {0}
    # Nothing of ours stays on SGLang's objects.
    assert "forward" not in vars(eager.model)


def test_a_measurement_leaves_the_random_state(eager: Any) -> None:
    from kvarena.plugin.engines.sglang.measure.run import measure
    from kvarena.plugin.ranks import Alone

    torch.manual_seed(3)
    before = torch.get_rng_state()
    steps, unseen = measure(eager, [StepShape("prefill", "extend", 1, 16)], ranks=Alone(), meter=FakeMeter())
    assert torch.equal(before, torch.get_rng_state())
    assert ([step.name for step in steps], unseen, len(eager.model.seen)) == (["prefill"], 0, 2)


def test_sglangs_sampler_takes_the_batch_that_is_made_for_it(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.release.publish(page_size=4, enable_unified_memory=True, sampling_backend="pytorch")
    sampler = object.__new__(resolve("sglang.srt.layers.sampler.Sampler"))
    torch.nn.Module.__init__(sampler)
    for name, value in {
        "use_nan_detection": False, "tp_sync_group": None, "cp_sync_group": None,
        "rl_on_policy_target": None, "enable_deterministic": False, "use_log_softmax_logprob": False,
        "use_ascend_backend": False, "sampling_mask_max_tokens": None, "use_flashinfer": False,
    }.items():  # fmt: skip
        setattr(sampler, name, value)
    sampled: list[Any] = []
    forward = sampler.forward
    monkeypatch.setattr(sampler, "forward", lambda *given: sampled.append(forward(*given)), raising=False)
    runner = SimpleNamespace(device="cpu", sampler=sampler, model_config=SimpleNamespace(vocab_size=128))
    run_module.run_step(runner, StepShape("sampling with top-p", "sample", 5, requests=5), lambda: None)
    (tokens,) = sampled
    assert tokens.shape == (5,)
