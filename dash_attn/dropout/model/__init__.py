"""What attention's dropout should cost on a GPU, from counts: `python -m dash_attn.dropout.model --help`.

Three ways to have the random bits of a transformer block's attention, as times of the block:

    fused         GEMMs + A + (1 - f) F       the bits are made inside attention, which hides the share f of their time
    sequential    GEMMs + A + U + R           they are made before, by a kernel of its own, and attention reads them
    overlapped    GEMMs + A + U + what is left of R beside the GEMM before attention

A is attention without dropout, F the time of the generator inside attention, R that of the one that stands alone and U
that of using stored bits. While the generator runs beside a GEMM, the GEMM takes 1 + a times and the generator 1 + b
times as long as alone. docs/dropout.md derives the formulas and says which constants are measured: `constants` has
them, each with its source. `--measured FILE` takes them from a result of `benchmarks.dropout_model`, and sets what they
predict beside its rows.
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
