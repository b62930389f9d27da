"""Compares the results of grids that have targets with these targets: our throughput over a baseline's, or over our own
at another shape.

    python -m benchmarks.bars result.json --grid sharded     # each claim, and whether its target is met
"""

import argparse
import json
import pathlib
from typing import NamedTuple

from benchmarks import compare
from benchmarks.compare import BITS, NAMES, OURS, Mean, Peer
from benchmarks.shapes import GRIDS, Shape

PASSES = ("backward", "forward")
FA3, FA3_DETERMINISTIC = Peer("fa3", False), Peer("fa3", True)
# The minimum ratios to a baseline by (head dims, pass). A forward has one mode, which results call deterministic.
BARS = {
    ((192, 128), "backward"): {FA3_DETERMINISTIC: 1.15, FA3: 1.0},
    ((192, 192), "backward"): {FA3_DETERMINISTIC: 1.15, FA3: 1.0},
    ((256, 256), "backward"): {FA3: 1.0},
    **{((head_dim, v), "forward"): {FA3_DETERMINISTIC: 1.0} for head_dim, v in ((192, 128), (192, 192), (256, 256))},
}
LEAST_OF_96 = 0.9  # of our backward's throughput at head dim 128
LEAST_OF_SOFTCAP = 0.85  # of the throughput of our causal passes at head dim 128 without a softcap
# By (head_dim, pass): the most time that attention with existing dropout bits may take, over the time without dropout.
MOST_WITH_BITS = {(128, "forward"): 1.06, (128, "backward"): 1.06, (64, "forward"): 1.12, (64, "backward"): 1.10}
# For both passes, including the generation of the bits.
MOST_OF_DROPOUT = 1.15  # of the time without dropout
LEAST_TO_TORCH = 1.25  # of the throughput of the fastest baseline with dropout

# For the sharded grids, by pass and whether the best baseline is deterministic: the minimum geometric mean, and the
# minimum at every shape. A forward has one mode.
OVER_BEST = {("backward", False): (1.0, 0.90), ("backward", True): (1.15, 1.0), ("forward", True): (1.05, 0.95)}
# The minimum TFLOP/s of the backward for single shapes of head dim 128 with the causal mask.
LEAST_TFLOPS = {
    Shape("bf16", 128, 8, 1, "causal", 8192, 1): 570.0,
    Shape("bf16", 128, 32, 4, "causal", 32768, 1): 600.0,
}


class Claim(NamedTuple):
    """A ratio at every shape where both sides were measured, or the TFLOP/s of one shape.

    `least_bar` is the target of the minimum ratio if it differs from `bar`. `names_all` says whether to name the shape
    with all of its properties.
    """

    of: str
    pass_: str
    against: str
    mean: Mean
    bar: float | None
    least_bar: float | None = None
    names_all: bool = False

    def cells(self) -> list[str]:
        worst = self.mean.worst
        where = str(worst) if self.names_all else f"{worst.mask_name}, {worst.sequences_name}"
        bars = _shown(self.bar) if self.bar else "-"
        if self.least_bar:
            bars += f", minimum {_shown(self.least_bar)}"
        shown = [self.of, self.pass_, self.against, str(self.mean.shapes), _shown(self.mean.ratio)]
        return [*shown, f"{_shown(self.mean.least)} ({where})", bars]

    def verdict(self) -> str:
        if self.bar is None:
            return "no target"
        if self.mean.ratio < self.bar:
            return "missed"
        return "met" if self.mean.least >= (self.least_bar or self.bar) else "met in the mean, not at every shape"


def _shown(x: float) -> str:
    """Formats a ratio, or TFLOP/s."""
    return f"{x:.2f}" if x < 100 else f"{x:.0f}"


HEADS = ["case", "pass", "baseline", "shapes", "geometric mean", "minimum", "target"]


class Run:
    """The figures of one result."""

    def __init__(self, path: pathlib.Path, grid: str):
        self.commit = json.loads(path.read_text())["meta"]["commit"]
        self.grid = GRIDS[grid]()
        self.shapes = set(self.grid)
        self.figures = {pass_: compare.read(path, pass_) for pass_ in (*PASSES, "both")}

    def ours(self, pass_: str, impl: str = OURS) -> dict[Shape, float]:
        found = {}
        for shape, figures in self.figures[pass_].items():
            own = [f.tflops for f in figures if f.impl == impl and f.deterministic and f.schedule in ("auto", None)]
            if own and shape in self.shapes:
                found[shape] = max(own)
        return found

    def to_ours(self, pass_: str, other: dict[Shape, Shape], impl: str = OURS) -> dict[Shape, float]:
        """Returns our throughput at a shape, for `impl`, over our plain throughput at its other shape, where both were
        measured."""
        first, ours = self.ours(pass_, impl), self.ours(pass_)
        return {a: first[a] / ours[b] for a, b in other.items() if a in first and b in ours}

    def to_fastest(self, pass_: str, shapes: list[Shape]) -> dict[Shape, float]:
        """Returns our throughput over that of the fastest baseline in any mode."""
        figures = {shape: self.figures[pass_][shape] for shape in shapes if shape in self.ours(pass_)}
        rows = [row for row in compare.compare(figures, figures) if row.peers]
        return {row.shape: row.ratio(max(row.peers, key=lambda peer: peer.tflops)) for row in rows}

    def to_best(self, pass_: str, shapes: list[Shape], deterministic: bool) -> dict[Shape, float]:
        """Returns our throughput over that of the best baseline in this mode."""
        figures = {shape: self.figures[pass_][shape] for shape in shapes if shape in self.ours(pass_)}
        rows = compare.compare(figures, figures)
        return {row.shape: row.ratio(best) for row in rows if (best := row.best(deterministic))}

    def to_peers(self, pass_: str, shapes: list[Shape]) -> dict[Peer, dict[Shape, float]]:
        """Returns our throughput over each baseline's, deterministic baselines first."""
        figures = {shape: self.figures[pass_][shape] for shape in shapes if shape in self.ours(pass_)}
        rows = compare.compare(figures, figures)
        return {
            peer: {row.shape: row.ratio(best) for row in rows if (best := row.best(peer.deterministic, peer.impl))}
            for peer in compare.measured_peers(rows)
        }


def _claim(of: str, pass_: str, against: str, ratios: dict[Shape, float], bar: float | None = None) -> list[Claim]:
    mean = compare.mean_of(ratios)
    return [Claim(of, pass_, against, mean, bar)] if mean else []


def _name(peer: Peer, pass_: str) -> str:
    return NAMES.get(peer.impl, peer.impl) if pass_ == "forward" else str(peer)


def of_head_dims(run: Run) -> list[Claim]:
    """Compares head dim 96 with our own 128, and every pair of head dims with each baseline."""
    grid = GRIDS["head-dims"]()
    found = []
    for dims in dict.fromkeys(shape.head_dims for shape in grid):
        shapes = [shape for shape in grid if shape.head_dims == dims]
        of = shapes[0].head_dims_name
        for pass_ in PASSES:
            if dims == (96, 96):
                other = {shape: compared_with(shape) for shape in shapes}
                bar = LEAST_OF_96 if pass_ == "backward" else None
                found += _claim(of, pass_, "dash_attn at 128", run.to_ours(pass_, other), bar)
            for peer, ratios in run.to_peers(pass_, shapes).items():
                found += _claim(of, pass_, _name(peer, pass_), ratios, BARS.get((dims, pass_), {}).get(peer))
    return found


def of_scores(run: Run) -> list[Claim]:
    """Compares each kind of scores with our own throughput without it, by head dim and mask, and with each baseline."""
    grid = [shape for shape in GRIDS["scores"]() if shape.scores]
    found = []
    for key in dict.fromkeys((shape.scores, shape.head_dim, shape.mask) for shape in grid):
        scores, head_dim, mask = key
        shapes = [shape for shape in grid if (shape.scores, shape.head_dim, shape.mask) == key]
        of = f"{scores}, {head_dim} {mask}"
        has_bar = scores.startswith("softcap") and (head_dim, mask) == (128, "causal")
        for pass_ in PASSES:
            without = run.to_ours(pass_, {shape: compared_with(shape) for shape in shapes})
            found += _claim(of, pass_, "dash_attn without it", without, LEAST_OF_SOFTCAP if has_bar else None)
            for peer, ratios in run.to_peers(pass_, shapes).items():
                found += _claim(of, pass_, _name(peer, pass_), ratios)
    return found


def of_dropout(run: Run) -> list[Claim]:
    """Compares each probability at each head dim, with existing bits and with their generation, with our own throughput
    without dropout, and with torch's attention with dropout."""
    grid = [shape for shape in GRIDS["dropout"]() if shape.dropout_p]
    found = []
    for key in dict.fromkeys((shape.dropout_p, shape.head_dim) for shape in grid):
        shapes = [shape for shape in grid if (shape.dropout_p, shape.head_dim) == key]
        p, head_dim = key
        plain = "dash_attn without dropout"
        of, other = f"dropout {p}, {head_dim}", {shape: shape.undropped for shape in shapes}
        for pass_ in PASSES:
            bar = 1 / MOST_WITH_BITS[head_dim, pass_]
            found += _claim(f"{of}, existing bits", pass_, plain, run.to_ours(pass_, other, BITS), bar)
            found += _claim(of, pass_, plain, run.to_ours(pass_, other))
        found += _claim(of, "both", plain, run.to_ours("both", other), 1 / MOST_OF_DROPOUT)
    for p in dict.fromkeys(shape.dropout_p for shape in grid):
        shapes = [shape for shape in grid if shape.dropout_p == p]
        found += _claim(f"dropout {p}", "both", FASTEST, run.to_fastest("both", shapes), LEAST_TO_TORCH)
        for peer, ratios in run.to_peers("both", shapes).items():
            found += _claim(f"dropout {p}", "both", _name(peer, "both"), ratios)
    return found


def of_sharded(run: Run) -> list[Claim]:
    """Compares with the best baseline of each mode, by head dim and mask and over all shapes, which have the targets;
    and the shapes that have their own targets."""
    groups: dict[str, list[Shape]] = {}
    for shape in run.grid:
        groups.setdefault(f"{shape.head_dim} {shape.mask}", []).append(shape)
    found = []
    for of, shapes in {**groups, "all": run.grid}.items():
        for (pass_, deterministic), bars in OVER_BEST.items():
            mode = "deterministic" if deterministic else "non-deterministic"
            against = f"the best {mode} baseline" if pass_ == "backward" else "the best baseline"
            mean = compare.mean_of(run.to_best(pass_, shapes, deterministic))
            if mean:
                found.append(Claim(of, pass_, against, mean, *(bars if of == "all" else (None, None)), True))
    ours = run.ours("backward")
    for shape, tflops in LEAST_TFLOPS.items():
        if shape in ours:
            mean = Mean(ours[shape], 1, ours[shape], shape)
            found.append(Claim(f"{shape.head_dim} {shape.mask}", "backward", "TFLOP/s", mean, tflops, None, True))
    return found


FASTEST = "the fastest baseline with dropout"
CLAIMS = {
    "sharded": of_sharded,
    "sharded_held_out": of_sharded,
    "head-dims": of_head_dims,
    "scores": of_scores,
    "dropout": of_dropout,
}


def compared_with(shape: Shape) -> Shape | None:
    """Returns the shape of ours with which a shape is compared."""
    if shape.scores:
        return shape.plain
    if shape.dropout_p:
        return shape.undropped
    return shape.at_head_dim(128) if shape.head_dims == (96, 96) else None


def ratios_by_shape(run: Run, pass_: str) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and rows of a table: our throughput at every shape, over our own at the shape with which it is
    compared, and over each baseline's."""
    ours = run.ours(pass_)
    peers = run.to_peers(pass_, list(ours))
    own = run.to_ours(pass_, {shape: other for shape in ours if (other := compared_with(shape))})
    rows = []
    for shape, tflops in ours.items():
        mask = shape.mask_name + (f", {shape.scores}" if shape.scores else "")
        mask += f", dropout {shape.dropout_p}" if shape.dropout_p else ""
        cells = [shape.head_dims_name, shape.heads_name, mask, f"{shape.batch} x {shape.seqlen}", f"**{tflops:.0f}**"]
        columns = [own, *peers.values()]
        rows.append([*cells, *(f"{ratios[shape]:.2f}" if shape in ratios else "-" for ratios in columns)])
    heads = ["head_dim", "heads", "mask", "batch x seqlen", "dash_attn", "over dash_attn"]
    return [*heads, *(f"over {_name(peer, pass_)}" for peer in peers)], rows


def report(claims: list[Claim]) -> str:
    """Formats a line per claim: the case, the ratio, the minimum, the target and whether the target is met."""
    rows = [[*HEADS, "verdict"], *([*claim.cells(), claim.verdict()] for claim in claims)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths)).rstrip() for row in rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--grid", choices=CLAIMS, required=True)
    arguments = parser.parse_args(argv)
    claims = CLAIMS[arguments.grid](Run(arguments.result, arguments.grid))
    if not claims:
        raise SystemExit(f"error: {arguments.result} must have figures of the grid {arguments.grid}, got none")
    print(report(claims))


if __name__ == "__main__":
    main()
