"""What attention's dropout should cost on a GPU, from counts: `python -m dash_attn.dropout.model --help`.

Three ways to have the random bits of a transformer block's attention, as times of the block:

    fused         GEMMs + A + (1 - f) F       the bits are made inside attention, which hides the share f of their time
    sequential    GEMMs + A + U + R           they are made before, by a kernel of its own, and attention reads them
    overlapped    GEMMs + A + U + what is left of R beside the GEMM before attention

A is attention without dropout, F the time of the generator inside attention, R that of the one that stands alone and U
that of using stored bits. While the generator runs beside a GEMM, the GEMM takes 1 + a times and the generator 1 + b
times as long as alone. docs/dropout.md derives the formulas and says which constants are measured: `constants` has
them, each with its source.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

UNMEASURED = "unmeasured"
_FORWARD_SOURCE = "measured: benchmarks/results/h200_2026-11-22_f8a3122_forward.json, 16 heads of 128"
_BACKWARD_SOURCE = "measured: benchmarks/results/h200_2026-11-21_d9f3fb9.json, 16 heads of 128"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A constant of the model, in the unit that its name says, and where it is from."""

    value: float
    source: str

    @property
    def is_measured(self) -> bool:
        return self.source.startswith("measured")


@dataclasses.dataclass(frozen=True)
class Rates:
    """TFLOP/s of attention by length: what was measured at the nearest one that is not longer, or at the shortest."""

    causal: tuple[int, ...]
    full: tuple[int, ...]
    source: str
    factor: float = 1.0

    def at(self, seqlen: int, causal: bool) -> float:
        place = max(0, bisect.bisect_right(_LENGTHS, seqlen) - 1)
        return self.factor * (self.causal if causal else self.full)[place]


_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_FORWARD = (551, 605, 635, 642, 654), (626, 646, 657, 652, 620)
_BACKWARD = (452, 530, 575, 608, 618), (552, 593, 611, 621, 621)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU."""

    name: str
    sms: Figure
    clock_ghz: Figure
    """While it works on attention or a GEMM."""
    gemm_tflops: Figure
    imad_wide_lanes: Figure
    """Lanes of IMAD.WIDE, 32-bit products of 64 bits, in a clock and an SM. Philox has two in a round."""
    forward: Rates
    backward: Rates
    logic_lanes: Figure = Figure(64, "the vendor's table of throughputs: 32-bit logical operations")
    issue_lanes: Figure = Figure(128, "four schedulers of 32 lanes")


def _scaled(machine: str, sms: int, clock: float, peak: float) -> Machine:
    """A machine of which nothing was measured: the H200's shares of its peak, of 989 TFLOP/s, are taken over."""
    factor, source = peak / 989, f"{UNMEASURED}: the H200's share of the peak"
    return Machine(
        machine,
        Figure(sms, "the vendor's data sheet"),
        Figure(clock, f"{UNMEASURED}: the vendor's boost clock"),
        Figure(round(700 * factor), source),
        Figure(32, UNMEASURED),
        Rates(*_FORWARD, source, factor),
        Rates(*_BACKWARD, source, factor),
    )


MACHINES = {
    "h200": Machine(
        "h200",
        Figure(132, "the vendor's data sheet"),
        Figure(1.7, f"{UNMEASURED}: under this load"),
        Figure(700, f"{UNMEASURED}: bf16, large GEMMs"),
        Figure(32, f"{UNMEASURED}: 32 or 64"),
        Rates(*_FORWARD, _FORWARD_SOURCE),
        Rates(*_BACKWARD, _BACKWARD_SOURCE),
    ),
    "a100": _scaled("a100", 108, 1.41, 312),
    "b200": _scaled("b200", 148, 1.85, 2250),
}


@dataclasses.dataclass(frozen=True)
class Block:
    """The shape of a transformer block."""

    name: str
    width: int
    heads: int
    kv_heads: int
    hidden: int
    """Of the feed-forward network; of one expert, where there are some."""
    matrices: int = 3
    """Of the feed-forward network: 3 where it is gated."""
    experts: int = 1
    """That a token goes through."""
    head_dim: int = 128

    def projection_flops(self, tokens: int) -> float:
        """Of the GEMM before attention, to queries, keys and values."""
        return 2.0 * tokens * self.width * (self.heads + 2 * self.kv_heads) * self.head_dim

    def other_flops(self, tokens: int) -> float:
        """Of all other GEMMs of the block's forward."""
        output = self.width * self.heads * self.head_dim
        return 2.0 * tokens * (output + self.width * self.hidden * self.matrices * self.experts)

    def output_flops(self, tokens: int) -> float:
        return 2.0 * tokens * self.width * self.heads * self.head_dim

    def pairs(self, tokens: int, seqlen: int, causal: bool) -> float:
        """Of a query and a key, over all query heads: the bits that are needed."""
        return tokens * seqlen * self.heads * (0.5 if causal else 1.0)


BLOCKS = {
    block.name: block
    for block in (
        Block("GPT-3 175B", 12288, 96, 96, 49152, matrices=2),
        Block("Llama-2 7B", 4096, 32, 32, 11008),
        Block("Llama-2 70B", 8192, 64, 8, 28672),
        Block("Llama-3 8B", 4096, 32, 8, 14336),
        Block("Llama-3 70B", 8192, 64, 8, 28672),
        Block("Mixtral 8x7B", 4096, 32, 8, 14336, experts=2),
    )
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What beside the machine and the shape the times depend on."""

    rounds: int = 7
    planes: int = 8
    """Binary digits of the random numbers; 4 where p is a multiple of 1/16."""
    gemm_slowdown: Figure = Figure(0.05, f"{UNMEASURED}: a")
    generator_slowdown: Figure = Figure(0.33, f"{UNMEASURED}: b")
    hidden_in_attention: Figure = Figure(0.15, f"{UNMEASURED}: f; what the two ratios of arXiv 2410.07531 v2 amount to")
    exposed_use: Figure = Figure(1.0, f"{UNMEASURED}: the share of using stored bits that nothing hides; 1 is a bound")
    generator_efficiency: Figure = Figure(0.9, f"{UNMEASURED}: of the rate that instructions allow")
    forward_use: Figure = Figure(1.25, f"{UNMEASURED}: instructions an element to use stored bits, counted")
    backward_use: Figure = Figure(2.75, f"{UNMEASURED}: instructions an element to use stored bits, counted")


def generator_instructions(rounds: int, planes: int) -> tuple[float, float]:
    """(IMAD.WIDE, all instructions) an element of the bit-sliced generator, counted in csrc/dropout/mask.h.

    A call of Philox makes 4 planes of 32 elements in `rounds` rounds of 2 products and 2 logical operations; a plane is
    used by one more; an address, a store and a step of the counter are 3 for each 32 elements.
    """
    calls = planes / 4
    products, logic = 2 * rounds * calls, 2 * rounds * calls + planes
    return products / 32, (products + logic + 3) / 32


def generator_rate(machine: Machine, settings: Settings) -> float:
    """Elements a second of the generator that stands alone, on the whole machine."""
    products, total = generator_instructions(settings.rounds, settings.planes)
    clocks = max(
        products / machine.imad_wide_lanes.value,
        (total - products) / machine.logic_lanes.value,
        total / machine.issue_lanes.value,
    )
    return settings.generator_efficiency.value * _clocks(machine) / clocks


def fused_rate(machine: Machine, settings: Settings) -> float:
    """Elements a second of a generator inside attention: a byte an element, compared and applied one by one."""
    products = 2 * settings.rounds / 16
    logic = products + 1.5
    clocks = max(
        products / machine.imad_wide_lanes.value,
        logic / machine.logic_lanes.value,
        (products + logic) / machine.issue_lanes.value,
    )
    return _clocks(machine) / clocks


def _clocks(machine: Machine) -> float:
    """Of all SMs, a second."""
    return machine.sms.value * machine.clock_ghz.value * 1e9


def together(gemm: float, generator: float, a: float, b: float) -> float:
    """Time of a GEMM and a generator that start at once, of their times alone: the longer is alone at its end."""
    if generator * (1 + b) <= gemm * (1 + a):
        return gemm + generator * (1 + b) * a / (1 + a)
    return gemm * (1 + a) + generator - gemm * (1 + a) / (1 + b)


@dataclasses.dataclass(frozen=True)
class Times:
    """Of one block, in seconds."""

    gemms: float
    attention: float
    generator: float
    fused: float
    sequential: float
    overlapped: float

    def __add__(self, other: Times) -> Times:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Times(*(a + b for a, b in pairs))


def times(
    block: Block, seqlen: int, machine: Machine, settings: Settings, *, tokens: int, causal: bool, backward: bool
) -> Times:
    """Of a forward, or of a backward, for which the bits are made again beside the two GEMMs of the output projection.

    Args:
        tokens: of the batch, a multiple of seqlen.
    """
    pairs = block.pairs(tokens, seqlen, causal)
    passes = 2 if backward else 1
    gemm_rate = machine.gemm_tflops.value * 1e12
    before = block.output_flops(tokens) * 2 if backward else block.projection_flops(tokens)
    every = passes * (block.projection_flops(tokens) + block.other_flops(tokens)) / gemm_rate
    attention_flops = pairs * block.head_dim * (10 if backward else 4)
    attention = attention_flops / ((machine.backward if backward else machine.forward).at(seqlen, causal) * 1e12)
    instructions = (settings.backward_use if backward else settings.forward_use).value * settings.exposed_use.value
    use = instructions * pairs / (machine.issue_lanes.value * _clocks(machine))
    generator = pairs / generator_rate(machine, settings)
    inside = (1 - settings.hidden_in_attention.value) * pairs / fused_rate(machine, settings)
    beside = before / gemm_rate
    a, b = settings.gemm_slowdown.value, settings.generator_slowdown.value
    return Times(
        every,
        attention,
        generator,
        fused=every + attention + inside,
        sequential=every + attention + use + generator,
        overlapped=every - beside + attention + use + together(beside, generator, a, b),
    )


def constants(machine: Machine, settings: Settings) -> Iterator[tuple[str, str, str]]:
    """(name, value, source) of every constant."""
    for owner in (machine, settings):
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, Figure):
                yield field.name, f"{value.value:g}", value.source
            elif isinstance(value, Rates):
                for causal, mask in ((True, "causal"), (False, "full")):
                    numbers = ", ".join(f"{value.at(length, causal):.0f} at {length}" for length in _LENGTHS)
                    yield f"{mask} {field.name}, TFLOP/s", numbers, value.source
    yield "rounds, planes", f"{settings.rounds}, {settings.planes}", "chosen"


@dataclasses.dataclass(frozen=True)
class Row:
    block: Block
    seqlen: int
    forward: Times
    both: Times


def rows(
    blocks: Sequence[Block], seqlens: Sequence[int], machine: Machine, settings: Settings, *, tokens: int, causal: bool
) -> list[Row]:
    """A row for each block and length: of its forward, and of forward and backward."""
    made = []
    for block in blocks:
        for seqlen in seqlens:
            whole = max(tokens // seqlen, 1) * seqlen
            forward, backward = (
                times(block, seqlen, machine, settings, tokens=whole, causal=causal, backward=backward)
                for backward in (False, True)
            )
            made.append(Row(block, seqlen, forward, forward + backward))
    return made


def table(made: Sequence[Row]) -> str:
    """In Markdown: milliseconds of the forward, and ratios."""
    text = [
        "| block | seqlen | GEMMs, ms | attention | generator | fused | sequential | overlapped "
        "| seq. / overlapped | fused / overlapped | both passes: seq. | fused |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in made:
        t, both = row.forward, row.both
        numbers = [f"{1e3 * x:.2f}" for x in dataclasses.astuple(t)]
        ratios = [t.sequential / t.overlapped, t.fused / t.overlapped]
        ratios += [both.sequential / both.overlapped, both.fused / both.overlapped]
        numbers += [f"{ratio:.3f}" for ratio in ratios]
        text.append(f"| {row.block.name} | {row.seqlen} | {' | '.join(numbers)} |")
    return "\n".join(text)


def draw(path: str, made: Sequence[Row]) -> None:
    """The ratios of both passes over the length, a line for each block.

    Raises:
        ValueError: the path is no PNG.
        ImportError: matplotlib is missing.
    """
    if not path.endswith(".png"):
        raise ValueError(f"path must end in .png, got {path!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise ImportError(f"drawing the model needs matplotlib: pip install matplotlib ({error})") from error
    figure = Canvas(figsize=(11, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, name in zip(axes, ("sequential", "fused")):
        for block in dict.fromkeys(row.block for row in made):
            own = [row for row in made if row.block is block]
            ratios = [getattr(row.both, name) / row.both.overlapped for row in own]
            axis.plot([row.seqlen for row in own], ratios, marker="o", label=block.name)
        axis.set(xscale="log", xlabel="sequence length", title=f"{name} / overlapped, forward and backward")
        axis.set_xticks(sorted({row.seqlen for row in made}), labels=sorted({row.seqlen for row in made}), minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle("Predicted; constants are not all measured")
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dash_attn.dropout.model",
        description="Predicts what a transformer block takes with attention's dropout fused, sequential and overlapped "
        "with the GEMM before attention. Nothing runs on a GPU; constants that were not measured are listed as such.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    settings = Settings()
    parser.add_argument("--gpu", choices=sorted(MACHINES), default="h200", help="machine")
    parser.add_argument(
        "--blocks", nargs="+", choices=list(BLOCKS), default=list(BLOCKS), metavar="NAME", help="shapes"
    )
    parser.add_argument(
        "--seqlens", nargs="+", type=int, default=list(_LENGTHS), metavar="N", help="lengths of the sequences"
    )
    parser.add_argument("--tokens", type=int, default=16384, metavar="N", help="of the batch; at least one sequence")
    parser.add_argument("--mask", choices=["causal", "full"], default="causal", help="mask")
    parser.add_argument("--rounds", type=int, default=settings.rounds, metavar="N", help="of Philox")
    parser.add_argument("--planes", type=int, choices=[4, 8], default=settings.planes, help="4 where 16 p is whole")
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        if isinstance(value, Figure):
            name = "--" + field.name.replace("_", "-")
            parser.add_argument(name, type=float, default=value.value, metavar="X", help=value.source)
    for name in _OF_MACHINE:
        parser.add_argument(
            "--" + name.replace("_", "-"), type=float, metavar="X", help="of the machine; None: its own"
        )
    parser.add_argument("--png", metavar="PATH", help="draw the ratios; needs matplotlib")
    return parser


def _given(arguments: argparse.Namespace) -> tuple[Machine, Settings]:
    """What the command line says, with the sources of what it leaves as it is.

    Raises:
        ValueError: a number is out of its range.
    """
    for name, value in (*(("seqlens", n) for n in arguments.seqlens), *vars(arguments).items()):
        if name in ("tokens", "rounds", "seqlens") and isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
        if name in _SHARES and value > 1:
            raise ValueError(f"{name} must be at most 1, got {value}")
        may_be_zero = name not in (*_OF_MACHINE, "generator_efficiency")
        if isinstance(value, float) and not (0 <= value < float("inf") and (value > 0 or may_be_zero)):
            raise ValueError(
                f"{name} must be a finite number {'of at least' if may_be_zero else 'above'} 0, got {value}"
            )
    machine = _changed(MACHINES[arguments.gpu], arguments)
    settings = _changed(Settings(), arguments)
    return machine, dataclasses.replace(settings, rounds=arguments.rounds, planes=arguments.planes)


_Owner = TypeVar("_Owner", Machine, Settings)
_OF_MACHINE = ("sms", "clock_ghz", "gemm_tflops", "imad_wide_lanes")
_SHARES = ("hidden_in_attention", "exposed_use", "generator_efficiency")


def _changed(owner: _Owner, arguments: argparse.Namespace) -> _Owner:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(owner):
        value, own = getattr(arguments, field.name, None), getattr(owner, field.name)
        if isinstance(own, Figure) and value is not None and value != own.value:
            changes[field.name] = Figure(value, "given")
    return dataclasses.replace(owner, **changes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and the constants, and draws what is asked for."""
    given = _parser().parse_args(arguments)
    try:
        machine, settings = _given(given)
        blocks = [BLOCKS[name] for name in given.blocks]
        made = rows(blocks, given.seqlens, machine, settings, tokens=given.tokens, causal=given.mask == "causal")
        if given.png:
            draw(given.png, made)
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"dash_attn.dropout.model: {error}")
    print(f"Predicted, {machine.name}, {given.mask} mask, {settings.rounds} rounds; the generator alone makes ", end="")
    print(f"{generator_rate(machine, settings) / 1e12:.1f}e12 bits/s.\n\n{table(made)}\n")
    print("| constant | value | source |\n|---|---|---|")
    for line in constants(machine, settings):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
