"""The engine's steps, with fixed shapes and static buffers: captured on CUDA, warmed up on the CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import torch
from kvarena.plugin.engines.embedded.config import PAD, EngineConfig
from kvarena.plugin.engines.embedded.model import Decoder, StepInputs, StepOutputs

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.attention import PagedKV

__all__ = ["Choice", "Row", "StepRunner", "WarmUp"]


class Row(msgspec.Struct, frozen=True):
    """One sequence's part in a step."""

    tokens: Sequence[int]
    """The tokens whose KV the step computes: one to decode, up to a chunk to prefill."""
    position: int
    """Position of the first of them."""
    pages: Sequence[int]
    """Virtual pages of the sequence, from its start."""


class Choice(msgspec.Struct, frozen=True):
    """What a step says about a row."""

    token: int
    logit: float
    margin: float
    """How far the second logit lies below."""


class WarmUp(msgspec.Struct, frozen=True):
    """What was made ready before the pool was sized."""

    how: Literal["graphs", "plain"]
    steps: int
    milliseconds: float


class StepRunner:
    """Runs the decoder in a few fixed shapes over one pool.

    Parameters
    ----------
    config : EngineConfig
        Gives the shapes: one prefill chunk, and the batch sizes of decode.
    model : Decoder
    kv : PagedKV
    captured : bool
        Whether to capture CUDA graphs; without CUDA it changes nothing.
    """

    def __init__(self, config: EngineConfig, model: Decoder, kv: PagedKV, *, captured: bool = True) -> None:
        self._config = config
        self._prefill = [
            _Step(model, kv, rows=1, length=config.chunk, width=width) for width in config.widths
        ]
        # The narrowest first, and the fewest rows first: the first that holds a batch is the cheapest.
        self._decode = [
            _Step(model, kv, rows=rows, length=1, width=width)
            for width in config.widths
            for rows in config.batch_sizes
        ]
        self._capture = captured and model.device.type == "cuda"

    def warm_up(self) -> WarmUp:
        """Run steps on dummy rows, which write slot 0 only; capture them all where there is CUDA.

        Without capture, the largest of each kind is enough: what memory steps need besides the pool,
        that one has taken.
        """
        began = time.perf_counter()
        steps = [*self._prefill, *self._decode]
        if not self._capture:
            steps = [max(kind, key=lambda step: step.size) for kind in (self._prefill, self._decode)]
        # The largest first: the smaller graphs then fit into its memory.
        for step in sorted(steps, key=lambda step: step.size, reverse=True):
            step.warm_up(capture=self._capture)
        milliseconds = (time.perf_counter() - began) * 1e3
        return WarmUp("graphs" if self._capture else "plain", len(steps), milliseconds)

    def prefill(self, row: Row) -> Choice:
        """Compute the KV of up to one chunk, and the token after its last."""
        return _smallest(self._prefill, [row]).run([row])[0]

    def decode(self, rows: Sequence[Row]) -> list[Choice]:
        """Compute one token for each row, in the smallest captured shapes that hold them."""
        maximum = self._decode[-1].rows
        choices: list[Choice] = []
        for start in range(0, len(rows), maximum):
            part = rows[start : start + maximum]
            choices += _smallest(self._decode, part).run(part)
        return choices


class _Step:
    """One shape: its static buffers, and its graph once captured."""

    def __init__(self, model: Decoder, kv: PagedKV, *, rows: int, length: int, width: int) -> None:
        self.rows, self.length, self.width = rows, length, width
        self._model, self._kv = model, kv
        self._host = _dummy_inputs(rows, length, width, torch.device("cpu"))
        self._inputs = _dummy_inputs(rows, length, width, model.device)
        self._outputs = StepOutputs(
            token=torch.zeros(rows, dtype=torch.int64, device=model.device),
            best=torch.zeros(rows, 2, device=model.device),
        )
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def size(self) -> int:
        return self.rows * self.length * self.width

    def warm_up(self, *, capture: bool) -> None:
        if not capture:
            self._forward()
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward()
        self._graph = graph

    def run(self, rows: Sequence[Row]) -> list[Choice]:
        host = self._host
        host.tokens.fill_(PAD)
        host.positions.fill_(-1)
        host.pages.fill_(0)
        for index, row in enumerate(rows):
            count = len(row.tokens)
            host.tokens[index, :count] = torch.tensor(row.tokens)
            host.positions[index, :count] = torch.arange(row.position, row.position + count)
            host.pages[index, : len(row.pages)] = torch.tensor(row.pages)
            host.last[index] = count - 1
        for name in StepInputs.__struct_fields__:
            getattr(self._inputs, name).copy_(getattr(host, name))
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()
        tokens = self._outputs.token[: len(rows)].tolist()
        best = self._outputs.best[: len(rows)].tolist()
        return [
            Choice(token=token, logit=first, margin=first - second)
            for token, (first, second) in zip(tokens, best, strict=True)
        ]

    @torch.no_grad()
    def _forward(self) -> None:
        self._model.forward(self._inputs, self._kv, self._outputs)


def _smallest(steps: Sequence[_Step], rows: Sequence[Row]) -> _Step:
    width = max(len(row.pages) for row in rows)
    return next(step for step in steps if step.rows >= len(rows) and step.width >= width)


def _dummy_inputs(rows: int, length: int, width: int, device: torch.device) -> StepInputs:
    return StepInputs(
        tokens=torch.full((rows, length), PAD, dtype=torch.int64, device=device),
        positions=torch.full((rows, length), -1, dtype=torch.int64, device=device),
        pages=torch.zeros((rows, width), dtype=torch.int64, device=device),
        last=torch.zeros(rows, dtype=torch.int64, device=device),
    )
