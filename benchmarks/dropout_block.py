"""A transformer block as calls, for `benchmarks.dropout_model`: its GEMMs, the generator of dropout bits, attention,
and all of them one after the other or overlapped.

A block consists of its matrix products and its attention, without norms, activations, rotary embeddings or residuals.
Each call has its own tensors of random values, so that nothing depends on earlier calls. Together they exceed any
cache.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmarks import peers
from benchmarks.shapes import Shape
from benchmarks.timing import Call
from dash_attn import dropout
from dash_attn.dropout import layout
from dash_attn.dropout.model import Block
from dash_attn.dropout.model.judge import BESIDE

HEAD_DIM = 128
EXPERTS_OF_EACH = 4  # experts per expert that a token uses: Mixtral has 8 for 2
# In the order of the forward; attention comes after the first.
GEMMS = ("qkv", "out", "up", "down")


@dataclasses.dataclass(frozen=True)
class Gemm:
    """x (rows, depth) times a weight of (columns, depth), `batch` times."""

    rows: int
    depth: int
    columns: int
    batch: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.depth * self.columns


def gemms_of(block: Block, tokens: int) -> dict[str, Gemm]:
    """Returns the block's GEMMs by name. Gated feed-forward inputs are one GEMM; all experts get the same tokens."""
    of_experts, rows = 1, tokens
    if block.experts > 1:
        of_experts = EXPERTS_OF_EACH * block.experts
        rows = max(1, tokens * block.experts // of_experts)
    heads = block.heads * block.head_dim
    return {
        "qkv": Gemm(tokens, block.width, heads + 2 * block.kv_heads * block.head_dim),
        "out": Gemm(tokens, heads, block.width),
        "up": Gemm(rows, block.width, (block.matrices - 1) * block.hidden, of_experts),
        "down": Gemm(rows, block.hidden, block.width, of_experts),
    }


def gemm_calls(gemm: Gemm, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Call]:
    """Returns calls of torch's matmul, which is cuBLAS on a GPU: "forward" is the product, and "backward" computes the
    gradients of x and of the weight."""

    def normal(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty((gemm.batch, rows, columns), dtype=dtype, device=device).normal_(std=scale)
        return made if gemm.batch > 1 else made[0]

    x, weight = normal(gemm.rows, gemm.depth), normal(gemm.columns, gemm.depth, gemm.depth**-0.5)
    y, dy = normal(gemm.rows, gemm.columns), normal(gemm.rows, gemm.columns)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def backward() -> None:
        torch.matmul(dy, weight, out=dx)
        torch.matmul(dy.mT, x, out=dweight)

    return {"forward": lambda: torch.matmul(x, weight.mT, out=y), "backward": backward}


class Made(NamedTuple):
    """The part of DropoutBits that the calls of `benchmarks.peers` use."""

    bits: torch.Tensor
    state: dropout.DropoutState


class Generator:
    """Generates bits into its own tensor: those that attention needs with the causal mask. On a CPU, which has no such
    op, it generates all bits."""

    def __init__(self, batch: int, heads: int, seqlen: int, p: float, device: torch.device, causal: bool = True):
        self.sizes = dict(batch=batch, heads=heads, seqlen_q=seqlen, seqlen_k=seqlen)
        self.state = dropout.DropoutState.of(1, 2, device)
        self.p, self.causal = p, causal
        shape = layout.shape_of(batch, heads, seqlen, seqlen)
        self._bits = torch.empty(shape, dtype=torch.uint8, device=device)

    def call(self, rounds: int = 7) -> Call:
        if self._bits.device.type != "cuda":
            return lambda: self._bits.copy_(
                dropout.dropout_bits(self.state, p=self.p, rounds=rounds, **self.sizes).bits
            )
        seqlen, heads = self.sizes["seqlen_q"], self.sizes["heads"]
        numbers = self.p, seqlen, seqlen, 0, heads, 0, 0, False, rounds
        mask = self.causal, -1, -1, 0
        return lambda: torch.ops.dash_attn_C.dropout_bits(self._bits, self.state.rng_state, *numbers, *mask, 0)

    def made(self) -> Made:
        """Returns the bits after `call` has run."""
        return Made(self._bits, self.state)


def attention_calls(
    shape: Shape, generator: Generator, device: torch.device, failures: list[str]
) -> dict[str, dict[str, Call]]:
    """Returns the calls of each pass: "plain" is ours without dropout, "bits" is ours with existing bits, and on a GPU
    "fa2" and "fa2_dropout" are torch's FlashAttention-2, which generates its random numbers inside.

    Args:
        shape: the shape, with its dropout_p.
        failures: receives a line for each call that raises, which is then missing.
    """
    plain = peers.random_tensors(shape.undropped, device)
    generator.call()()
    dropped = dataclasses.replace(plain, dropout=generator.made())
    calls = {}
    for name, implementation, of, x in (
        ("plain", peers.DashAttn(["auto"]), shape.undropped, plain),
        ("bits", peers.DashAttnBits(["auto"]), shape, dropped),
        ("fa2", peers.TorchFlashAttention2(), shape.undropped, plain),
        ("fa2_dropout", peers.TorchFlashAttention2(), shape, plain),
    ):
        if implementation.unavailable(device):
            continue
        try:
            variant = next(v for v in reversed(implementation.variants(of)))
            prepared = implementation.prepare(variant, of, x)
            calls[name] = {pass_: prepared[pass_] for pass_ in ("forward", "backward")}
        except Exception as error:  # a baseline may raise anything for an unsupported shape
            failures.append(f"attention {name}, {of}: {type(error).__name__}: {str(error)[:200]}")
    return calls


def in_turn(calls: Sequence[Call]) -> Call:
    def call() -> None:
        for each in calls:
            each()

    return call


def beside(gemm: Call, generator: Call, side: "torch.cuda.Stream | None") -> Call:
    """Runs both at once: the generator on its own stream, queued after the GEMM, so that it gets the SMs that are free.
    Later work waits for both. On a CPU they run one after the other."""

    def call() -> None:
        if side is None:
            gemm()
            generator()
            return
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        gemm()
        with torch.cuda.stream(side):
            generator()
        current.wait_stream(side)

    return call


@dataclasses.dataclass(frozen=True)
class Pass:
    """The calls of a block's forward or backward."""

    name: str
    gemms: dict[str, Call]
    attention: Call
    generator: Call
    side: "torch.cuda.Stream | None"

    @property
    def calls(self) -> int:
        """The number of GEMMs, plus attention."""
        return len(self.gemms) * (2 if self.name == "backward" else 1) + 1

    def _whole(self, before: Call) -> Call:
        """`before` is the GEMM of BESIDE and the generator."""
        if self.name == "forward":
            return in_turn([before, self.attention, *(self.gemms[name] for name in ("out", "up", "down"))])
        return in_turn([*(self.gemms[name] for name in ("down", "up")), before, self.attention, self.gemms["qkv"]])

    def sequential(self) -> Call:
        return self._whole(in_turn([self.gemms[BESIDE[self.name]], self.generator]))

    def overlapped(self) -> Call:
        return self._whole(beside(self.gemms[BESIDE[self.name]], self.generator, self.side))
