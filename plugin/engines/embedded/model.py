"""A small decoder of alternating full and sliding-window attention, with seeded weights.

Its words are bytes. It is not trained: what it says has no meaning, but every token depends on
all the KV that the model may see, which is what a test of KV memory needs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
import torch
import torch.nn.functional as F
from kvarena.plugin.engines.embedded.config import BOS, PAD, VOCABULARY, ModelConfig

if TYPE_CHECKING:
    from kvarena.plugin.engines.embedded.attention import PagedKV

__all__ = ["Decoder", "StepInputs", "StepOutputs"]

# Attention logits of this spread put most of the weight on a few tokens. At the usual spread of 1,
# random weights average all values away and no KV page would matter.
_SHARPNESS: Final = 3.0
_ROPE_BASE: Final = 10_000.0


class StepInputs(msgspec.Struct, frozen=True):
    """The static buffers that a captured step reads; int64, on the model's device."""

    tokens: torch.Tensor
    """(rows, length) token ids; anything where the position is negative."""
    positions: torch.Tensor
    """(rows, length) positions in the sequence; negative: padding, its KV goes to slot 0."""
    pages: torch.Tensor
    """(rows, width) virtual page ids of each sequence; 0 beyond its end."""
    last: torch.Tensor
    """(rows,) index along ``length`` of the token whose successor is asked for."""


class StepOutputs(msgspec.Struct, frozen=True):
    """The static buffers that a captured step writes."""

    token: torch.Tensor
    """(rows,) int64: the most likely next token."""
    best: torch.Tensor
    """(rows, 2) float32: the two highest logits."""


class Decoder:
    """Weights and the forward step.

    Parameters
    ----------
    config : ModelConfig
        Sizes and the seed.
    device : torch.device
        Where the weights live. They are drawn on the CPU, so every device gets the same ones.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        generator = torch.Generator().manual_seed(config.seed)

        def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            weight = torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))
            return weight.to(device)

        self._embedding = draw(VOCABULARY, config.hidden_size, gain=math.sqrt(config.hidden_size))
        self._layers = [
            _Layer(
                q=draw(config.head_num * config.head_dim, config.hidden_size, gain=_SHARPNESS),
                k=draw(config.kv_heads(layer) * config.head_dim, config.hidden_size),
                v=draw(config.kv_heads(layer) * config.head_dim, config.hidden_size),
                o=draw(config.hidden_size, config.head_num * config.head_dim),
                gate_up=draw(2 * config.intermediate_size, config.hidden_size),
                down=draw(config.hidden_size, config.intermediate_size),
            )
            for layer in range(config.layer_num)
        ]
        self._head = draw(VOCABULARY, config.hidden_size)
        self._banned = torch.zeros(VOCABULARY)
        self._banned[[BOS, PAD]] = -torch.inf
        self._banned = self._banned.to(device)
        half = config.head_dim // 2
        self._frequencies = (_ROPE_BASE ** -(torch.arange(half, dtype=torch.float32) / half)).to(device)

    def forward(self, inputs: StepInputs, kv: PagedKV, outputs: StepOutputs) -> None:
        """One step: write the tokens' KV, attend, and choose each row's next token.

        Nothing here looks at a value on the host, so the step can be captured: shapes are those of
        `inputs`, and the physical pages are read through the tables on the device at each run.
        """
        config = self.config
        kv.begin(inputs.positions, inputs.pages)
        rotation = self._rotation(inputs.positions.clamp(min=0))
        hidden = self._embedding[inputs.tokens]
        rows, length = inputs.tokens.shape
        for index, layer in enumerate(self._layers):
            x = _norm(hidden)
            q = F.linear(x, layer.q).view(rows, length, config.head_num, config.head_dim)
            k = F.linear(x, layer.k).view(rows, length, -1, config.head_dim)
            v = F.linear(x, layer.v).view(rows, length, -1, config.head_dim)
            q, k = _rotate(_norm(q) * _SHARPNESS, rotation), _rotate(_norm(k), rotation)
            attended = kv.attend(index, q, k, v)
            hidden = hidden + F.linear(attended.reshape(rows, length, -1), layer.o)
            gate, up = F.linear(_norm(hidden), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        final = hidden[torch.arange(rows, device=self.device), inputs.last]
        logits = F.linear(_norm(final), self._head) + self._banned
        best = torch.topk(logits, 2, dim=-1)
        outputs.best.copy_(best.values)
        outputs.token.copy_(best.indices[:, 0])

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.to(torch.float32)[..., None, None] * self._frequencies
        return angles.cos(), angles.sin()


class _Layer(msgspec.Struct, frozen=True):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def _norm(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm with unit weights (random weights would add nothing)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding of (rows, length, heads, head_dim), halves as pairs."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
