"""Measures whether a transformer block is faster if dropout bits are generated beside a GEMM.

    python -m benchmarks.dropout_block --json transformer_blocks.json
    python -m benchmarks.dropout_block --blocks "Llama-3 8B" --seqlens 8192

A block consists of its matrix products and its attention, without norms, activations, rotary embeddings or residuals.
Its forward and its backward are measured in two ways. `sequential` generates the bits between the GEMM and attention.
`overlapped` generates them on a second stream beside the GEMM that precedes attention: the projection to queries, keys
and values in the forward, and the two products of the output projection in the backward, for which the bits are
generated again. The parts are measured alone too: each GEMM, the generator, and attention with and without dropout,
ours with existing bits and torch's FlashAttention-2, which generates its random numbers inside.

Each call has its own tensors of random values, so that nothing depends on earlier calls. Together they exceed any
cache. The file is written after every block, and a call that fails leaves its figures out.
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from benchmarks import files, peers, run, timing
from benchmarks.shapes import Shape
from benchmarks.timing import Call
from dash_attn import dropout
from dash_attn.dropout import layout

HEAD_DIM = 128
EXPERTS_OF_EACH = 4  # experts per expert that a token uses: Mixtral has 8 for 2
PASSES = ("forward", "backward")
# The GEMM beside which the generator runs.
BESIDE = {"forward": "qkv", "backward": "out"}


@dataclasses.dataclass(frozen=True)
class Block:
    """The shape of a transformer block."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    """The hidden size of the feed-forward network, or of one expert."""
    matrices: int = 3
    """The number of matrices in the feed-forward network: 3 if it is gated."""
    experts: int = 1
    """The number of experts that a token uses."""


BLOCKS = {
    "Llama-2 7B": Block(4096, 32, 32, 11008),
    "Llama-3 8B": Block(4096, 32, 8, 14336),
    "Mixtral 8x7B": Block(4096, 32, 8, 14336, experts=2),
    "Llama-2 70B": Block(8192, 64, 8, 28672),
    "GPT-3 175B": Block(12288, 96, 96, 49152, matrices=2),
}


@dataclasses.dataclass(frozen=True)
class Gemm:
    """x (rows, depth) times a weight of (columns, depth), `batch` times."""

    rows: int
    depth: int
    columns: int
    batch: int = 1


def gemms_of(block: Block, tokens: int) -> dict[str, Gemm]:
    """Returns the block's GEMMs by name, in the order of the forward; attention follows the first. Gated feed-forward
    inputs are one GEMM; all experts get the same tokens."""
    of_experts, rows = 1, tokens
    if block.experts > 1:
        of_experts = EXPERTS_OF_EACH * block.experts
        rows = max(1, tokens * block.experts // of_experts)
    heads = block.heads * HEAD_DIM
    return {
        "qkv": Gemm(tokens, block.width, heads + 2 * block.kv_heads * HEAD_DIM),
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

    def __init__(self, batch: int, heads: int, seqlen: int, p: float, device: torch.device):
        self.sizes = dict(batch=batch, heads=heads, seqlen_q=seqlen, seqlen_k=seqlen)
        self.state = dropout.DropoutState.of(1, 2, device)
        self.p = p
        shape = layout.shape_of(batch, heads, seqlen, seqlen)
        self._bits = torch.empty(shape, dtype=torch.uint8, device=device)

    def call(self, rounds: int = layout.DEFAULT_ROUNDS) -> Call:
        if self._bits.device.type != "cuda":
            return lambda: self._bits.copy_(
                dropout.dropout_bits(self.state, p=self.p, rounds=rounds, **self.sizes).bits
            )
        seqlen, heads = self.sizes["seqlen_q"], self.sizes["heads"]
        numbers = self.p, seqlen, seqlen, 0, heads, 0, 0, False, rounds
        causal = True, -1, -1, 0
        return lambda: torch.ops.dash_attn_C.dropout_bits(self._bits, self.state.rng_state, *numbers, *causal, 0)

    def made(self) -> Made:
        """Returns the bits after `call` has run."""
        return Made(self._bits, self.state)


def attention_calls(
    shape: Shape, generator: Generator, device: torch.device, failures: list[str]
) -> dict[str, dict[str, Call]]:
    """Returns the calls of each pass: "plain" is ours without dropout, "bits" is ours with existing bits, and on a GPU
    "fa2" and "fa2_dropout" are torch's FlashAttention-2.

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
            calls[name] = {pass_: prepared[pass_] for pass_ in PASSES}
        except Exception as error:  # a baseline may raise anything for an unsupported shape
            failures.append(f"attention {name}, {of}: {_told(error)}")
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

    def _whole(self, before: Call) -> Call:
        """`before` is the GEMM of BESIDE and the generator."""
        if self.name == "forward":
            return in_turn([before, self.attention, *(self.gemms[name] for name in ("out", "up", "down"))])
        return in_turn([*(self.gemms[name] for name in ("down", "up")), before, self.attention, self.gemms["qkv"]])

    def sequential(self) -> Call:
        return self._whole(in_turn([self.gemms[BESIDE[self.name]], self.generator]))

    def overlapped(self) -> Call:
        return self._whole(beside(self.gemms[BESIDE[self.name]], self.generator, self.side))


@dataclasses.dataclass
class Bench:
    """Where and how to measure, and what failed."""

    device: torch.device
    tokens: int
    p: float
    min_time_s: float
    failures: list[str] = dataclasses.field(default_factory=list)

    def ms(self, of: str, calls: dict[Hashable, Call]) -> dict[Hashable, float]:
        """Returns the milliseconds of each call. A call that raises is missing and is a failure."""
        timings, errors = timing.measure(calls, device=self.device, min_time_s=self.min_time_s)
        self.failures += [f"{of}, {name}: {_told(error)}" for name, error in errors.items()]
        return {name: round(taken.ms, 5) for name, taken in timings.items()}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def measure(name: str, seqlen: int, pass_: str, bench: Bench) -> dict:
    """Measures a block's forward or backward and its parts."""
    block, device = BLOCKS[name], bench.device
    batch = max(bench.tokens // seqlen, 1)
    tokens = batch * seqlen
    generator = Generator(batch, block.heads, seqlen, bench.p, device)
    shape = Shape("bf16", HEAD_DIM, block.heads, block.kv_heads, "causal", seqlen, batch, dropout_p=bench.p)
    attention = {of: calls[pass_] for of, calls in attention_calls(shape, generator, device, bench.failures).items()}
    gemms = {of: gemm_calls(gemm, device)[pass_] for of, gemm in gemms_of(block, tokens).items()}
    calls = {("gemm", of): call for of, call in gemms.items()}
    calls |= {("generator", rounds): generator.call(rounds) for rounds in dropout.ROUNDS}
    named = {"plain": "attention", "bits": "attention_bits", "fa2": "fa2", "fa2_dropout": "fa2_dropout"}
    calls |= {named[of]: call for of, call in attention.items()}
    if "bits" in attention:
        side = torch.cuda.Stream() if device.type == "cuda" else None
        whole = Pass(pass_, gemms, attention["bits"], generator.call(), side)
        calls |= {"sequential": whole.sequential(), "overlapped": whole.overlapped()}
    ms = bench.ms(f"{name}, {seqlen}, {pass_}", calls)
    row = {"block": name, "seqlen": seqlen, "tokens": tokens, "pass": pass_, "gemm_ms": {}, "generator_ms": {}}
    for key, taken in ms.items():
        if isinstance(key, tuple):
            row[f"{key[0]}_ms"][str(key[1])] = taken
        else:
            row[f"{key}_ms"] = taken
    return row


RATIOS: dict[str, Callable[[dict], float]] = {
    "generator / GEMM beside it": lambda row: (
        row["generator_ms"][str(layout.DEFAULT_ROUNDS)] / row["gemm_ms"][BESIDE[row["pass"]]]
    ),
    "sequential / overlapped": lambda row: row["sequential_ms"] / row["overlapped_ms"],
    "attention with bits / without dropout": lambda row: row["attention_bits_ms"] / row["attention_ms"],
    "FlashAttention-2 with / without dropout": lambda row: row["fa2_dropout_ms"] / row["fa2_ms"],
}


def table(rows: Sequence[dict]) -> str:
    """Formats the RATIOS as a Markdown table, whose cells have the forward and the backward."""
    lines = ["| block | seqlen | " + " | ".join(RATIOS) + " |", "|---" * (2 + len(RATIOS)) + "|"]
    of = {(row["block"], row["seqlen"], row["pass"]): row for row in rows}
    for block, seqlen in sorted({key[:2] for key in of}, key=lambda key: (list(BLOCKS).index(key[0]), key[1])):
        passes = [of.get((block, seqlen, pass_), {}) for pass_ in PASSES]
        cells = [", ".join(_cell(ratio, row) for row in passes) for ratio in RATIOS.values()]
        lines.append(f"| {block} | {seqlen} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(ratio: Callable[[dict], float], row: dict) -> str:
    try:
        return f"{ratio(row):.2f}"
    except KeyError:  # a call failed
        return "-"


def summary(rows: Sequence[dict]) -> str:
    """Describes the gain of overlapping in a sentence."""
    gain = RATIOS["sequential / overlapped"]
    gains = [gain(row) for row in rows if {"sequential_ms", "overlapped_ms"} <= row.keys()]
    if not gains:
        return "No block was measured in both ways."
    return (
        f"The block in sequence takes {min(gains):.2f} to {max(gains):.2f} times as long as the block with bits beside "
        f"the GEMM, {statistics.geometric_mean(gains):.2f} times on average."
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=pathlib.Path, help="file for the result, written after every block")
    result.add_argument("--p", type=float, default=0.125, help="the probability of dropping (default 1/8)")
    result.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=list(BLOCKS), metavar="NAME",
                        help=f"default: all of {', '.join(BLOCKS)}")  # fmt: skip
    result.add_argument("--seqlens", nargs="+", type=int, default=[2048, 8192, 32768], metavar="N",
                        help="lengths of sequences (default 2048 8192 32768)")  # fmt: skip
    result.add_argument("--tokens", type=int, default=16384, help="tokens, at least one sequence (default 16384)")
    result.add_argument("--min-time", type=float, default=0.04, help="seconds per call (default 0.04)")
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if not 0 < arguments.p < 1:
        raise SystemExit(f"error: --p must be above 0 and below 1, got {arguments.p}")
    device = torch.device(arguments.device)
    bench = Bench(device, arguments.tokens, arguments.p, arguments.min_time)
    meta = {**run.metadata(device), "p": arguments.p, "before": run.state(device), "failures": bench.failures}
    rows: list[dict] = []
    for pass_, name, seqlen in itertools.product(PASSES, arguments.blocks, arguments.seqlens):
        print(f"{name}, {seqlen}, {pass_}", flush=True)
        try:
            rows.append(measure(name, seqlen, pass_, bench))
        except Exception as error:  # of a GPU, such as exhausted memory
            bench.failures.append(f"{name}, {seqlen}, {pass_}: {_told(error)}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        meta["after"] = run.state(device)
        if arguments.json:
            arguments.json.write_text(files.dumps({"meta": meta, "rows": rows}))
    print(f"\n{table(rows)}\n\n{summary(rows)}")
    for line in bench.failures:
        print(f"failed: {line}", flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
