"""The formulas of the model: what a transformer block takes by what its parts take, and these by counts and rates."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

UNMEASURED = "unmeasured"
DATA_SHEET = "the vendor's data sheet"
PEAK_TFLOPS = {"h200": 989, "a100": 312, "b200": 2250}
"""Of dense bf16 products, by the vendor's data sheets."""
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
    """While it works on attention or a GEMM."""
    gemm_tflops: Figure
    imad_wide_lanes: Figure
    """Lanes of IMAD.WIDE, 32-bit products of 64 bits, in a clock and an SM. Philox has two in a round."""
    forward: Rates
    backward: Rates
    logic_lanes: Figure = Figure(64, "the vendor's table of throughputs: 32-bit logical operations")
    issue_lanes: Figure = Figure(128, "four schedulers of 32 lanes")


def _scaled(machine: str, sms: int, clock: float) -> Machine:
    """A machine of which nothing was measured: the H200's shares of its peak are taken over."""
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
"""Queries, and keys, of a block of bits; and how many blocks past the diagonal's the generator makes, because a tile of
the backward may look at them (csrc/generator)."""


def generated_blocks(seqlen: int, causal: bool) -> int:
    """How many blocks of a head's bits the generator makes: under the causal mask those within reach of a tile."""
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

    def generated(self, tokens: int, seqlen: int, causal: bool) -> float:
        """The bits that the generator makes: whole blocks, under the causal mask those within reach of a tile."""
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
    """What beside the machine and the shape the times depend on."""

    rounds: int = 7
    planes: int = 8
    """Binary digits of the random numbers; 4 where p is a multiple of 1/16."""
    gemm_slowdown: Figure = Figure(0.05, f"{UNMEASURED}: a")
    generator_slowdown: Figure = Figure(0.33, f"{UNMEASURED}: b")
    hidden_in_attention: Figure = Figure(0.15, f"{UNMEASURED}: f; what the two ratios of arXiv 2410.07531 v2 amount to")
    hidden_in_backward: Figure = Figure(0.15, f"{UNMEASURED}: f of the backward; as the forward's")
    exposed_use: Figure = Figure(1.0, f"{UNMEASURED}: the share of using stored bits that nothing hides; 1 is a bound")
    generator_efficiency: Figure = Figure(0.9, f"{UNMEASURED}: of the rate that instructions allow")
    forward_use: Figure = Figure(1.25, f"{UNMEASURED}: instructions an element to use stored bits, counted")
    backward_use: Figure = Figure(2.75, f"{UNMEASURED}: instructions an element to use stored bits, counted")
    generator_start_us: Figure = Figure(0.0, f"{UNMEASURED}: what the generator takes for no elements")
    call_us: Figure = Figure(0.0, f"{UNMEASURED}: what a further call in a sequence takes beside its time alone")
    fork_us: Figure = Figure(0.0, f"{UNMEASURED}: what it takes to have a second stream and to join it")


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
class Parts:
    """Of one pass of a block, each alone, in seconds."""

    gemms: float
    """All of them."""
    beside: float
    """Those beside which the generator may run: the one to queries, keys and values in the forward, and in the
    backward, for which the bits are made again, the two of the output projection."""
    attention: float
    """Without dropout."""
    use: float
    """What attention takes longer with bits that are there."""
    generator: float
    inside: float
    """What attention takes longer that makes its random numbers itself."""
    calls: int
    """GEMMs and attention."""


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


def combined(parts: Parts, settings: Settings) -> Times:
    """What the block takes in the three ways, of what its parts take alone."""
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
    """Seconds of the generator alone."""
    return 1e-6 * settings.generator_start_us.value + elements / generator_rate(machine, settings)


def use_time(pairs: float, machine: Machine, settings: Settings, *, backward: bool) -> float:
    """Seconds that attention takes longer with stored bits."""
    instructions = (settings.backward_use if backward else settings.forward_use).value * settings.exposed_use.value
    return instructions * pairs / (machine.issue_lanes.value * _clocks(machine))


def inside_time(pairs: float, machine: Machine, settings: Settings, *, backward: bool) -> float:
    """Seconds that attention takes longer if it makes its random numbers itself."""
    hidden = settings.hidden_in_backward if backward else settings.hidden_in_attention
    return (1 - hidden.value) * pairs / fused_rate(machine, settings)


GEMMS_OF_FORWARD = 4
"""Calls: to queries, keys and values; the output projection; into the feed-forward network; out of it."""


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
    """(name, value, source) of every constant."""
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
