"""Run worst steps on a model runner and see what they take; nothing of them stays."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any, Protocol, final

import torch
from kvarena.plugin.engines.sglang.measure.errors import MeasureError
from kvarena.plugin.engines.sglang.measure.steps import StepShape
from kvarena.plugin.ranks import RankReport, Ranks
from kvarena.pool.reserve import MeasuredStep

__all__ = ["CudaMeter", "Meter", "measure", "run_step"]

#: No limit on the number of candidates, as SGLang spells it.
_ALL_TOKENS = 1 << 30


class Meter(Protocol):
    """Looks at a device's memory."""

    def begin(self) -> None:
        """From here on the peak counts; nothing is cached any more."""
        ...

    def peak_bytes(self) -> int:
        """The most that torch held since `begin`, beyond what it held then."""
        ...

    def unseen_bytes(self) -> int:
        """What is taken for good since `begin`, by whom torch does not know."""
        ...


@final
class CudaMeter:
    """Torch's *reserved* bytes, holes included, and what the driver says is free."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._held = self._free = 0

    def begin(self) -> None:
        """From here on the peak counts."""
        self._settle()
        self._held, self._free = self._now()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Of segments, as the driver sees them."""
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - self._held)

    def unseen_bytes(self) -> int:
        """Libraries' workspaces, connections and modules that were loaded."""
        self._settle()
        held, free = self._now()
        return max(0, (self._free - free) - (held - self._held))

    def _settle(self) -> None:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()

    def _now(self) -> tuple[int, int]:
        return torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]


def measure(
    runner: Any,
    shapes: Sequence[StepShape],
    *,
    ranks: Ranks,
    meter: Meter,
    run: Callable[[Any, StepShape, Callable[[], None]], None] | None = None,
) -> tuple[list[MeasuredStep], int]:
    """Run each step twice on every rank; the second counts.

    The first run loads modules, opens connections and compiles. After each step the ranks meet, so that one
    that fails ends all at the same step.

    Parameters
    ----------
    runner : ModelRunner
        With its graphs captured, and a pool of which only the sink has memory.
    run : callable, optional
        Instead of `run_step`.

    Returns
    -------
    list of MeasuredStep
        The largest figure of all ranks for each step.
    int
        Bytes that torch does not see and that the steps took for good, on the rank that has most.

    Raises
    ------
    MeasureError
        A step failed on a rank.
    """
    run = run_step if run is None else run
    found, unseen = [], 0
    for shape in shapes:
        mine = _of_this_rank(runner, shape, meter, run)
        reports = ranks.exchange(mine)
        failures = [
            f"rank {rank}: {report.failure or f'it is at {report.stage!r}'}"
            for rank, report in enumerate(reports)
            if report.failure or report.stage != mine.stage
        ]
        if failures:
            raise MeasureError(f"step {shape.name!r} could not be measured ({'; '.join(failures)}).")
        found.append(MeasuredStep(shape.name, max(report.nbytes for report in reports), shape.requests))
        unseen += max(report.tokens for report in reports)
    return found, unseen


def _of_this_rank(
    runner: Any, shape: StepShape, meter: Meter, run: Callable[[Any, StepShape, Callable[[], None]], None]
) -> RankReport:
    stage = f"measured {shape.name}"
    peak = unseen = 0
    try:
        with _no_trace(runner):
            for _ in range(2):
                run(runner, shape, meter.begin)
                peak = meter.peak_bytes()
                unseen += meter.unseen_bytes()
    except Exception as error:  # noqa: BLE001 - SGLang's own code and any kernel may raise anything
        why = str(error).strip().splitlines()
        return RankReport(stage, failure=f"{type(error).__name__}: {why[0] if why else 'no reason given'}")
    return RankReport(stage, nbytes=peak, tokens=unseen)


def run_step(runner: Any, shape: StepShape, begin: Callable[[], None]) -> None:
    """Run one step; `begin` is called when its inputs are there."""
    # The caller's mode: tensors of SGLang's are used, never kept.
    with torch.inference_mode():
        if shape.kind == "sample":
            _sample(runner, shape, begin)
        else:
            _forward(runner, shape, begin)


def _forward(runner: Any, shape: StepShape, begin: Callable[[], None]) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    eager = runner.eager_runner
    mode = ForwardMode.EXTEND if shape.kind == "extend" else ForwardMode.DECODE
    buffers = eager._alloc_dummy_decode_buffers(
        shape.batch, num_tokens_per_req=shape.tokens, allocate_logits_buffer=False
    )
    given = {"extend_num_tokens_per_req": shape.tokens} if shape.kind == "extend" else {}
    with _behind_a_prefix(runner, shape), _counts_as_extend(runner, shape.kind == "extend"):
        begin()
        eager._dummy_run(shape.batch, forward_mode_override=mode, buffers=buffers, **given)


def _sample(runner: Any, shape: StepShape, begin: Callable[[], None]) -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    group = getattr(runner, "pp_group", None)
    rows, device = shape.batch, runner.device
    given = {
        "temperatures": torch.ones((rows, 1), device=device),
        "top_ps": torch.full((rows,), 0.9, device=device),
        "top_ks": torch.full((rows,), _ALL_TOKENS, dtype=torch.int32, device=device),
        "min_ps": torch.zeros(rows, device=device),
        "is_all_greedy": False,
        "is_any_greedy": False,
        "need_top_p_sampling": True,
        "need_top_k_sampling": False,
        "need_min_p_sampling": False,
        "vocab_size": runner.model_config.vocab_size,
        "device": device,
    }
    known = {field.name for field in fields(SamplingBatchInfo)}
    info = SamplingBatchInfo(**{name: value for name, value in given.items() if name in known})
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    begin()
    if group is not None and not group.is_last_rank:
        return
    # The logits are part of what the step takes: after a decode that no graph covers they are new, too.
    logits = torch.zeros((rows, runner.model_config.vocab_size), dtype=torch.float32, device=device)
    runner.sampler(LogitsProcessorOutput(next_token_logits=logits), info, False, [], [], positions)


@contextmanager
def _behind_a_prefix(runner: Any, shape: StepShape) -> Iterator[None]:
    """Let ``prepare_dummy_forward_batch`` raise lengths: all reads still gather slot 0."""
    if not (shape.prefix or shape.longest):
        yield
        return
    prepare = runner.prepare_dummy_forward_batch

    def raised(batch: Any) -> Any:
        batch = prepare(batch)
        lengths = [shape.prefix + shape.tokens] * shape.batch
        if shape.longest:
            lengths[0] = max(lengths[0], shape.longest)
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=batch.seq_lens.dtype))
        batch.seq_lens_cpu.copy_(torch.tensor(lengths, dtype=batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum = sum(lengths)
        if shape.kind == "extend":
            batch.extend_prefix_lens.fill_(shape.prefix)
            batch.extend_prefix_lens_cpu = [shape.prefix] * shape.batch
            new = torch.arange(shape.prefix, shape.prefix + shape.tokens, dtype=batch.positions.dtype)
            batch.positions.copy_(new.repeat(shape.batch))
        else:
            batch.positions.copy_(torch.tensor(lengths, dtype=batch.positions.dtype) - 1)
        return batch

    with _attribute(runner, "prepare_dummy_forward_batch", raised):
        yield


@contextmanager
def _counts_as_extend(runner: Any, extend: bool) -> Iterator[None]:
    """A dummy run says "no prefill in this batch" whatever it runs, and experts would go the short way."""
    if not extend:
        yield
        return
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    forward = runner.model.forward

    def told(*args: Any, **kwargs: Any) -> Any:
        set_is_extend_in_batch(True)
        return forward(*args, **kwargs)

    # `_dummy_run` looks at the parameters of a pipeline stage's forward.
    told.__wrapped__ = forward  # type: ignore[attr-defined]
    try:
        with _attribute(runner.model, "forward", told):
            yield
    finally:
        set_is_extend_in_batch(False)


@contextmanager
def _no_trace(runner: Any) -> Iterator[None]:
    """The random state as it was; SGLang's dummies touch slot 0 alone, and no recorder, tree or metric."""
    device = torch.device(runner.device)
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.random.fork_rng(devices=[runner.gpu_id]))
        else:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        yield


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Shadow a method on one object."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
