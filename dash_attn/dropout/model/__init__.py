"""Predicts the cost of attention's dropout on a GPU from counts: `python -m dash_attn.dropout.model --help`.

A transformer block can get the random bits of its attention in three ways, which take the times

    fused         GEMMs + A + (1 - f) F       attention generates the bits itself, and hides the share f of their time
    sequential    GEMMs + A + U + R           a separate kernel generates the bits first, and attention reads them
    overlapped    GEMMs + A + U + the rest of R that does not fit next to the GEMM before attention

A is attention without dropout, F is the time of the generator inside attention, R that of the separate generator, and U
that of using stored bits. While the generator runs concurrently with a GEMM, the GEMM takes 1 + a times and the
generator 1 + b times as long as alone. docs/dropout.md derives the formulas. `constants` lists the constants with their
sources, and says which were measured. `--measured FILE` takes them from a result of `benchmarks.dropout_model`, and
compares the predictions with its rows.
"""

from .command import PACKAGED, main, read, report, title
from .fit import Fitted, fitted, interference, line, planes_of, proportion
from .formulas import (
    BLOCKS,
    MACHINES,
    Block,
    Figure,
    Machine,
    Settings,
    Times,
    constants,
    generator_instructions,
    generator_rate,
    generator_time,
    rows,
    times,
    together,
)
from .judge import WITHIN, Judged, every, gains, verdict
from .picture import draw_judged

__all__ = [
    "BLOCKS",
    "MACHINES",
    "PACKAGED",
    "WITHIN",
    "Block",
    "Figure",
    "Fitted",
    "Judged",
    "Machine",
    "Settings",
    "Times",
    "constants",
    "draw_judged",
    "every",
    "fitted",
    "gains",
    "generator_instructions",
    "generator_rate",
    "generator_time",
    "interference",
    "line",
    "main",
    "planes_of",
    "proportion",
    "read",
    "report",
    "rows",
    "times",
    "title",
    "together",
    "verdict",
]
