"""Attention over pages equals attention over plain tensors, for every page size and window."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kvarena.plugin.engines.embedded.config import EngineConfig
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.model import Decoder, StepInputs, StepOutputs
from kvarena.plugin.engines.embedded.requests import Request, Result


class _Dense:
    """All keys and values of one sequence, recomputed at each step: neither pages nor tables."""

    def __init__(self, config: EngineConfig) -> None:
        self._model = config.model

    def begin(self, positions: torch.Tensor, pages: torch.Tensor) -> None:
        self._at = positions[0]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = self._at[None, :] <= self._at[:, None]
        if self._model.is_window(layer):
            seen &= self._at[None, :] > self._at[:, None] - self._model.window
        mixed = torch.empty_like(q)
        for head in range(self._model.head_num):
            of = head // (self._model.head_num // self._model.kv_heads(layer))
            scores = q[0, :, head] @ k[0, :, of].T / math.sqrt(self._model.head_dim)
            mixed[0, :, head] = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v[0, :, of]
        return mixed


def _greedy(model: Decoder, config: EngineConfig, tokens: list[int], count: int) -> list[int]:
    answer: list[int] = []
    for _ in range(count):
        sequence = [*tokens, *answer]
        inputs = StepInputs(
            tokens=torch.tensor([sequence]),
            positions=torch.arange(len(sequence))[None],
            pages=torch.zeros(1, 1, dtype=torch.int64),
            last=torch.tensor([len(sequence) - 1]),
        )
        outputs = StepOutputs(token=torch.zeros(1, dtype=torch.int64), best=torch.zeros(1, 2))
        model.forward(inputs, _Dense(config), outputs)  # type: ignore[arg-type]
        answer.append(int(outputs.token))
    return answer


@pytest.mark.parametrize(
    ("page_size", "chunk_pages", "window"),
    [(1, 1, 1), (1, 7, 5), (2, 3, 1), (3, 1, 4), (4, 4, 12), (4, 2, 500), (16, 1, 7), (16, 2, 17)],
)
def test_paged_equals_dense(
    make_engine: Callable[..., Engine],
    generate: Callable[..., dict[int, Result]],
    change_model: Callable[..., EngineConfig],
    small: EngineConfig,
    texts: list[Request],
    page_size: int,
    chunk_pages: int,
    window: int,
) -> None:
    config = change_model(small, window=window).evolve(page_size=page_size, chunk_pages=chunk_pages)
    engine = make_engine(config)
    some = [texts[1], texts[4], texts[6]]
    results = generate(some, engine)

    for request in some:
        got = results[request.rid].tokens
        assert got == _greedy(engine.model, config, request.tokens, len(got))
    assert engine.report()["problems"] == []
