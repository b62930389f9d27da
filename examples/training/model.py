"""A Llama-style language model in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm, silu

from dash_attn.receipts import tap

from .attention import Attend
from .clock import Clock
from .layout import Layout
from .text import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a model. `head_dim` is width / heads; the MLP has `hidden` columns."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"--width must be an even multiple of --heads {self.heads}, got {self.width}")
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads must divide --heads {self.heads}, got {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


def rotary_angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, fp32 (positions, 1, head_dim / 2)."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = positions.float()[:, None] * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the two halves of each head by the angles of its row; x is (sequences, rows, heads, head_dim)."""
    cos, sin = angles
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int, attend: Attend, clock: Clock, layout: Layout) -> None:
        super().__init__()
        self.shape, self.layer, self.attend, self.clock, self.layout = shape, layer, attend, clock, layout
        of_heads, of_kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.width, of_heads, bias=False)
        self.k = nn.Linear(shape.width, of_kv_heads, bias=False)
        self.v = nn.Linear(shape.width, of_kv_heads, bias=False)
        self.o = nn.Linear(of_heads, shape.width, bias=False)

    def tapped(self, x: Tensor, name: str) -> Tensor:
        return tap(x, f"layers.{self.layer}.attention.{name}", shard=self.layout.shard(*x.shape[2:]))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.shape.head_dim)) for linear in (self.q, self.k, self.v))
        q, k, v = (self.tapped(t, n) for t, n in ((rotated(q, angles), "q"), (rotated(k, angles), "k"), (v, "v")))
        q, k, v = self.clock.begin("attention", self.layer, q, k, v)
        with torch.profiler.record_function(f"attention {self.layer}"):
            out = self.attend(q, k, v)
        out = self.tapped(self.clock.end("attention", self.layer, out), "out")
        return self.o(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape, layer: int, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock = layer, clock
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (x,) = self.clock.begin("mlp", self.layer, x)
        return self.clock.end("mlp", self.layer, self.down(silu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int, attend: Attend, clock: Clock, layout: Layout) -> None:
        super().__init__()
        self.layer, self.layout = layer, layout
        self.before_attention, self.before_mlp = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attention = Attention(shape, layer, attend, clock, layout)
        self.mlp = MLP(shape, layer, clock)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.before_attention(x), angles)
        x = x + self.mlp(self.before_mlp(x))
        return tap(x, f"layers.{self.layer}", shard=self.layout.shard(x.shape[-1]))


class Llama(nn.Module):
    """The model on this rank's rows. `forward` returns the sum of the loss over this rank's tokens.

    The weights depend only on `seed`, and not on the device or the layout.
    """

    def __init__(self, shape: Shape, attend: Attend, clock: Clock, layout: Layout, seed: int) -> None:
        super().__init__()
        self.shape, self.layout = shape, layout
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Layer(shape, n, attend, clock, layout) for n in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
        cos, sin = rotary_angles(layout.positions(), shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, tokens: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the input of the head, (sequences, rows, width).

        Args:
            tokens: int64 (sequences, rows).
            angles: the cosines and sines of the rows, fp32 (rows, 1, head_dim / 2) or (sequences, rows, 1,
                head_dim / 2).
        """
        x = tap(self.embedding(tokens), "embedding", shard=self.layout.shard(self.shape.width))
        for layer in self.layers:
            x = layer(x, angles)
        return self.norm(x)

    def logits(self, tokens: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of the next tokens, fp32 (sequences, rows, VOCABULARY), for the arguments of `hidden`."""
        return self.head(self.hidden(tokens, angles)).float()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(tokens, (self.cos, self.sin))
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
