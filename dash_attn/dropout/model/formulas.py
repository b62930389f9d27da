"""The formulas of the model: the time of a transformer block from those of its parts, and these from counts and
rates."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

UNMEASURED = "unmeasured"
DATA_SHEET = "the vendor's data sheet"
PEAK_TFLOPS = {"h200": 989, "a100": 312, "b200": 2250}
"""The peak for dense bf16 products, in TFLOP/s, from the vendor's data sheets."""
_FORWARD_SOURCE = "measured: benchmarks/results/h200_2026-11-22_f8a3122_forward.json, 16 heads of 128"
_BACKWARD_SOURCE = "measured: benchmarks/results/h200_2026-11-21_d9f3fb9.json, 16 heads of 128"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A constant of the model, in the unit that its name gives, and its source."""

    value: float
    source: str

    @property
    def is_measured(self) -> bool:
        return self.source.startswith("measured")


@dataclasses.dataclass(frozen=True)
class Rates:
    """TFLOP/s of attention by length: the value of the nearest measured length that is not longer, or of the
    shortest."""

    causal: tuple[int, ...]
    full: tuple[int, ...]
    source: str
    factor: float = 1.0

    def at(self, seqlen: int, causal: bool) -> float:
        place = max(0, bisect.bisect_right(LENGTHS, seqlen) - 1)
        return self.factor * (self.causal if causal else self.full)[place]


LENGTHS = (2048, 4096, 8192, 16384, 32768)
_FORWARD = (551, 605, 635, 642, 654), (626, 646, 657, 652, 620)
_BACKWARD = (452, 530, 575, 608, 618), (552, 593, 611, 621, 621)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU."""

    name: str
    sms: Figure
    clock_ghz: Figure
    """The clock during attention or a GEMM."""
    gemm_tflops: Figure
    imad_wide_lanes: Figure
    """Lanes of IMAD.WIDE, 32-bit products of 64 bits, per clock and SM. Philox has two per round."""
    forward: Rates
    backward: Rates
    logic_lanes: Figure = Figure(64, "the vendor's table of throughputs: 32-bit logical operations")
    issue_lanes: Figure = Figure(128, "four schedulers of 32 lanes")


def _scaled(machine: str, sms: int, clock: float) -> Machine:
    """Returns a machine without measurements, with the H200's shares of its peak."""
    factor, source = PEAK_TFLOPS[machine] / PEAK_TFLOPS["h200"], f"{UNMEASURED}: the H200's share of the peak"
    return Machine(
        machine,
        Figure(sms, DATA_SHEET),
        Figure(clock, f"{UNMEASURED}: the vendor's boost clock"),
        Figure(round(700 * factor), source),
        Figure(32, UNMEASURED),
        Rates(*_FORWARD, source, factor),
        Rates(*_BACKWARD, source, factor),
    )


MACHINES = {
    "h200": Machine(
        "h200",
        Figure(132, DATA_SHEET),
        Figure(1.7, f"{UNMEASURED}: under this load"),
        Figure(700, f"{UNMEASURED}: bf16, large GEMMs"),
        Figure(32, f"{UNMEASURED}: 32 or 64"),
        Rates(*_FORWARD, _FORWARD_SOURCE),
        Rates(*_BACKWARD, _BACKWARD_SOURCE),
    ),
    "a100": _scaled("a100", 108, 1.41),
    "b200": _scaled("b200", 148, 1.85),
}


BLOCK_ROWS, REACH_BLOCKS = 32, 8
"""Queries, and keys, per block of bits; and the number of blocks past the diagonal that the generator makes, because a
tile of the backward may read them (csrc/generator)."""


def generated_blocks(seqlen: int, causal: bool) -> int:
    """Returns the number of blocks that the generator makes per head: under the causal mask those within a tile."""
    of_row = -(-seqlen // BLOCK_ROWS)
    return sum(min(row + 1 + REACH_BLOCKS, of_row) if causal else of_row for row in range(of_row))


@dataclasses.dataclass(frozen=True)
class Block:
    """The shape of a transformer block."""

    name: str
    width: int
    heads: int
    kv_heads: int
    hidden: int
    """The hidden size of the feed-forward network, or of one expert."""
    matrices: int = 3
    """The number of matrices in the feed-forward network: 3 if it is gated."""
    experts: int = 1
    """The number of experts that a token uses."""
    head_dim: int = 128

    def projection_flops(self, tokens: int) -> float:
        """Returns the operations of the GEMM before attention, which computes queries, keys and values."""
        return 2.0 * tokens * self.width * (self.heads + 2 * self.kv_heads) * self.head_dim

    def other_flops(self, tokens: int) -> float:
        """Returns the operations of all other GEMMs of the block's forward."""
        output = self.width * self.heads * self.head_dim
        return 2.0 * tokens * (output + self.width * self.hidden * self.matrices * self.experts)

    def output_flops(self, tokens: int) -> float:
        return 2.0 * tokens * self.width * self.heads * self.head_dim

    def pairs(self, tokens: int, seqlen: int, causal: bool) -> float:
        """Returns the pairs of a query and a key over all query heads: the bits that are needed."""
        return tokens * seqlen * self.heads * (0.5 if causal else 1.0)

    def generated(self, tokens: int, seqlen: int, causal: bool) -> float:
        """Returns the bits that the generator makes: whole blocks, under the causal mask those within a tile."""
        return tokens / seqlen * self.heads * BLOCK_ROWS**2 * generated_blocks(seqlen, causal)


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
    """The inputs of the model besides the machine and the shape."""

    rounds: int = 7
    planes: int = 8
    """Binary digits of the random numbers; 4 if p is a multiple of 1/16."""
    gemm_slowdown: Figure = Figure(0.05, f"{UNMEASURED}: a")
    generator_slowdown: Figure = Figure(0.33, f"{UNMEASURED}: b")
    hidden_in_attention: Figure = Figure(0.15, f"{UNMEASURED}: f; follows from the two ratios in arXiv 2410.07531 v2")
    hidden_in_backward: Figure = Figure(0.15, f"{UNMEASURED}: f of the backward; as in the forward")
    exposed_use: Figure = Figure(1.0, f"{UNMEASURED}: the share of using stored bits that nothing hides; 1 is a bound")
    generator_efficiency: Figure = Figure(0.9, f"{UNMEASURED}: share of the rate that the instructions allow")
    forward_use: Figure = Figure(1.25, f"{UNMEASURED}: instructions per element to use stored bits, counted")
    backward_use: Figure = Figure(2.75, f"{UNMEASURED}: instructions per element to use stored bits, counted")
    generator_start_us: Figure = Figure(0.0, f"{UNMEASURED}: the generator's time for no elements")
    call_us: Figure = Figure(0.0, f"{UNMEASURED}: additional time of one more call in a sequence")
    fork_us: Figure = Figure(0.0, f"{UNMEASURED}: the time to fork and join a second stream")


def generator_instructions(rounds: int, planes: int) -> tuple[float, float]:
    """Returns (IMAD.WIDE, all instructions) per element of the bit-sliced generator, counted in csrc/dropout/mask.h.

    A call of Philox makes 4 planes of 32 elements in `rounds` rounds of 2 products and 2 logical operations. Using a
    plane takes one more operation; an address, a store and a step of the counter take 3 for each 32 elements.
    """
    calls = planes / 4
    products, logic = 2 * rounds * calls, 2 * rounds * calls + planes
    return products / 32, (products + logic + 3) / 32


def generator_rate(machine: Machine, settings: Settings) -> float:
    """Returns the elements per second of the separate generator, on the whole machine."""
    products, total = generator_instructions(settings.rounds, settings.planes)
    clocks = max(
        products / machine.imad_wide_lanes.value,
        (total - products) / machine.logic_lanes.value,
        total / machine.issue_lanes.value,
    )
    return settings.generator_efficiency.value * _clocks(machine) / clocks


def fused_rate(machine: Machine, settings: Settings) -> float:
    """Returns the elements per second of a generator inside attention: one byte each, compared and applied singly."""
    products = 2 * settings.rounds / 16
    logic = products + 1.5
    clocks = max(
        products / machine.imad_wide_lanes.value,
        logic / machine.logic_lanes.value,
        (products + logic) / machine.issue_lanes.value,
    )
    return _clocks(machine) / clocks


def _clocks(machine: Machine) -> float:
    """Returns the clocks per second of all SMs."""
    return machine.sms.value * machine.clock_ghz.value * 1e9


def together(gemm: float, generator: float, a: float, b: float) -> float:
    """Returns the time of a GEMM and a generator that start at once, from their times alone. The longer ends alone."""
    if generator * (1 + b) <= gemm * (1 + a):
        return gemm + generator * (1 + b) * a / (1 + a)
    return gemm * (1 + a) + generator - gemm * (1 + a) / (1 + b)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of one pass of a block, in seconds alone."""

    gemms: float
    """All GEMMs."""
    beside: float
    """The GEMMs next to which the generator may run: that of queries, keys and values in the forward, and those of the
    output projection in the backward, for which the bits are generated again."""
    attention: float
    """Attention without dropout."""
    use: float
    """Additional time of attention with existing bits."""
    generator: float
    inside: float
    """Additional time of attention that generates its random numbers itself."""
    calls: int
    """The number of GEMMs, plus attention."""


@dataclasses.dataclass(frozen=True)
class Times:
    """The times of one block, in seconds."""

    gemms: float
    attention: float
    generator: float
    fused: float
    sequential: float
    overlapped: float

    def __add__(self, other: Times) -> Times:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Times(*(a + b for a, b in pairs))


def combined(parts: Parts, settings: Settings) -> Times:
    """Returns the time of the block in the three ways, from the times of its parts alone."""
    plain = parts.gemms + parts.attention + 1e-6 * settings.call_us.value * (parts.calls - 1)
    a, b = settings.gemm_slowdown.value, settings.generator_slowdown.value
    both = together(parts.beside, parts.generator, a, b) + 1e-6 * settings.fork_us.value
    return Times(
        parts.gemms,
        parts.attention,
        parts.generator,
        fused=plain + parts.inside,
        sequential=plain + parts.use + parts.generator + 1e-6 * settings.call_us.value,
        overlapped=plain + parts.use + both - parts.beside,
    )


def generator_time(elements: float, machine: Machine, settings: Settings) -> float:
    """Returns the seconds of the generator alone."""
    return 1e-6 * settings.generator_start_us.value + elements / generator_rate(machine, settings)


def use_time(pairs: float, machine: Machine, settings: Settings, *, backward: bool) -> float:
    """Returns the additional seconds of attention with stored bits."""
    instructions = (settings.backward_use if backward else settings.forward_use).value * settings.exposed_use.value
    return instructions * pairs / (machine.issue_lanes.value * _clocks(machine))


def inside_time(pairs: float, machine: Machine, settings: Settings, *, backward: bool) -> float:
    """Returns the additional seconds of attention that generates its random numbers itself."""
    hidden = settings.hidden_in_backward if backward else settings.hidden_in_attention
    return (1 - hidden.value) * pairs / fused_rate(machine, settings)


GEMMS_OF_FORWARD = 4
"""GEMMs: queries, keys and values; the output projection; into the feed-forward network; out of it."""


def times(
    block: Block, seqlen: int, machine: Machine, settings: Settings, *, tokens: int, causal: bool, backward: bool
) -> Times:
    """Returns the times of a forward, or of a backward, which generates the bits again next to the output projection.

    Args:
        tokens: the tokens per batch, a multiple of seqlen.
    """
    pairs = block.pairs(tokens, seqlen, causal)
    passes = 2 if backward else 1
    gemm_rate = machine.gemm_tflops.value * 1e12
    before = block.output_flops(tokens) * 2 if backward else block.projection_flops(tokens)
    attention_rate = (machine.backward if backward else machine.forward).at(seqlen, causal) * 1e12
    parts = Parts(
        gemms=passes * (block.projection_flops(tokens) + block.other_flops(tokens)) / gemm_rate,
        beside=before / gemm_rate,
        attention=pairs * block.head_dim * (10 if backward else 4) / attention_rate,
        use=use_time(pairs, machine, settings, backward=backward),
        generator=generator_time(block.generated(tokens, seqlen, causal), machine, settings),
        inside=inside_time(pairs, machine, settings, backward=backward),
        calls=passes * GEMMS_OF_FORWARD + 1,
    )
    return combined(parts, settings)


def constants(machine: Machine, settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yields (name, value, source) for every constant."""
    for owner in (machine, settings):
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, Figure):
                yield field.name, f"{value.value:g}", value.source
            elif isinstance(value, Rates):
                for causal, mask in ((True, "causal"), (False, "full")):
                    numbers = ", ".join(f"{value.at(length, causal):.0f} at {length}" for length in LENGTHS)
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
    """Returns a row for each block and length, with its forward, and its forward and backward."""
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
